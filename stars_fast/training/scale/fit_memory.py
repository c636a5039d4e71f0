"""The choice of what the steps of a run recompute, made before the first of them."""

from functools import cache

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stars_fast.data.batches import Batches
from stars_fast.training.config import RunConfig
from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.memory import Choice, activation_budget, agree, choose
from stars_fast.training.step.precision import autocast
from stars_fast.training.step.step import StepLoss, root_of


def fit_memory(
    step_loss: nn.Module,
    loss: StepLoss,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    config: RunConfig,
    world: World,
) -> list[str]:
    """Measure what a micro-batch keeps for the backward pass, and set `loss.recompute` by what fits
    for each number of turns; lines that say so. Every process calls it, and all choose alike.

    `step_loss` is `loss`, perhaps made parallel.
    """
    largest = max(batches.window(0), key=lambda batch: batch.tokens.numel())
    with autocast(config.precision, world.device, config.parallel.sharded):
        measured = root_of(step_loss)(StepLoss.measure, largest)
    # Later micro-batches may hold more tokens.
    measured = measured.scaled(batches.most_tokens / largest.tokens.numel())
    whole_gradients = False
    if config.parallel.sharded:
        from stars_fast.training.scale.sharding import release

        release(step_loss)
        whole_gradients = config.train.accumulation > 1
    held = isinstance(step_loss, DistributedDataParallel)
    budget = activation_budget(config.memory, loss.loop.model, optimizer, whole_gradients, held)
    measured, budget = agree(measured, budget, world)
    kept = config.train.backprop_turns

    @cache
    def choice(turns: int, penalised: bool) -> Choice:
        shared = penalised and config.penalty.at == "last"
        in_graph = turns if kept is None else min(turns, kept)
        return choose(config.memory, measured, budget, in_graph - shared, penalised)

    loss.recompute = lambda turns, penalised: choice(turns, penalised).recompute
    usual, most = round(config.depth.mean()), config.depth.chances(config.train.total_steps)[-1][0]
    return [
        f"at {turns} turns {choice(turns, config.penalised == 'jacobian').describe()}"
        for turns in sorted({usual, most})
    ]
