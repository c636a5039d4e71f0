"""The choice of what the steps of a run recompute, made before the first of them."""

from collections.abc import Set
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stars_fast.data.batches import Batches, MicroBatch
from stars_fast.jsrr import fused_jsrr
from stars_fast.models.loop import Loop, Turn
from stars_fast.training.config import RunConfig
from stars_fast.training.scale.budget import activation_budget, agree, gathered_bytes
from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.measure import measure_activations
from stars_fast.training.scale.memory import Activations, Choice, choose
from stars_fast.training.step.cost import turns_in_graph
from stars_fast.training.step.micro_step import MicroStep, begin
from stars_fast.training.step.precision import autocast
from stars_fast.training.step.train_step import StepLoss, root_of
from stars_fast.training.step.turns import by_layer

BESIDE = 0.2
"""Part of the budget for micro-batches that run beside CUDA graphs, whose memory is not shared."""


def fit_memory(
    step_loss: nn.Module,
    loss: StepLoss,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    config: RunConfig,
    world: World,
    beside: Set[tuple[int, bool]] = frozenset(),
) -> list[str]:
    """Measure what a micro-batch keeps for the backward pass, and set `loss.recompute` by what fits
    for each number of turns; lines that say so. Every process calls it, and all choose alike.

    `step_loss` is `loss`, perhaps made parallel. `beside` are the plain turns in the graph, and
    whether a dual turn follows, of rare micro-batches that run beside the memory of CUDA graphs.
    """
    penalty = loss.penalty
    largest = max(batches.window(0), key=lambda batch: batch.tokens.numel())
    casts = autocast(config.precision, world.device, config.parallel.sharded)
    with loss.low.used(), casts:
        measured = root_of(step_loss).with_weights(measure, largest, config, penalty.needs_dual)
    # Later micro-batches may hold more tokens.
    measured = measured.scaled(batches.most_tokens / largest.tokens.numel())
    parallel, model = config.parallel, loss.loop.model
    several = config.train.accumulation > 1
    held = isinstance(step_loss, DistributedDataParallel)
    gathered = 0
    if parallel.sharded:
        from stars_fast.training.scale.sharding import release

        release(step_loss)
        dtype = torch.bfloat16 if config.precision == "mixed" else None
        gathered = gathered_bytes(step_loss, dtype, parallel.reshard)
    elif not (held or several):
        measured = measured._replace(weights=0)  # the sums become the gradients
    whole = parallel.sharded and several
    budget = activation_budget(config.memory, model, optimizer, whole, held, gathered)
    measured, budget = agree(measured, budget, world)

    @cache
    def choice(in_graph: int, dual: bool) -> Choice:
        room = budget
        if room is not None and beside:
            room = round(room * (BESIDE if (in_graph, dual) in beside else 1 - BESIDE))
        return choose(config.memory, measured, room, in_graph, dual)

    loss.recompute = lambda in_graph, dual: choice(in_graph, dual).recompute
    usual, most = round(config.depth.mean()), config.depth.chances(config.train.total_steps)[-1][0]
    return [
        f"at {turns} turns "
        + choice(turns_in_graph(config, turns, config.penalised), penalty.needs_dual).describe()
        for turns in sorted({usual, most})
    ]


def measure(loop: Loop, batch: MicroBatch, config: RunConfig, dual: bool) -> Activations:
    """Bytes that the micro-batch keeps for the backward pass; with `dual` of a dual turn too.

    A dual pass on a part of the samples may now and then be that of the whole micro-batch, which is
    what is measured.
    """
    with torch.no_grad():
        turn = MicroStep(loop, batch, config, 0).turn
    samples = batch.samples

    def penalty(turn: Turn, h: Tensor) -> Tensor:
        mask = None if samples.real is None else samples.real.to(h.device)
        return fused_jsrr(turn, h, mask=mask, cu_seqlens=samples.cu_seqlens)

    return measure_activations(
        loop.model,
        lambda: begin(loop, batch, config.precision).state,
        turn,
        lambda h: loop.token_loss(h, batch, 1),
        penalty if dual else None,
        by_layer(turn, loop.model),
    )
