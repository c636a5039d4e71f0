"""The training step on one page.

    tokens -> prelude -> turns [primal ... primal] -> coda -> head -> token loss --+
                                      |                                            +-> loss
                                   h^(t) -> dual turn -> Jacobian penalty ---------+

`StepLoss` is one micro-batch's share of the loss; `train_step` sums the shares of a window, over
micro-batches and ranks, and moves the weights.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stars_fast.jsrr import fused_jsrr
from stars_fast.models.looped import LoopedLM
from stars_fast.training.batches import MicroBatch
from stars_fast.training.config import TrainConfig
from stars_fast.training.distributed import World
from stars_fast.training.losses import adjacent_l2, token_loss
from stars_fast.training.optim import gradient_norm, learning_rate, step_if
from stars_fast.training.seeds import derive, sample_noise, seed_dropout
from stars_fast.training.turns import run_turns


class Plan(NamedTuple):
    """What a step does, known before it: its number, the turns of each micro-batch, lambda, lr."""

    step: int
    turns: list[int]
    weight: float
    lr: float


class StepStats(NamedTuple):
    """What a step did, as scalars on the device, equal on every rank.

    loss: token loss per supervised token. penalty: mean over samples, 0 without one. grad_norm:
    before clipping. tokens: real tokens. finite: whether the weights moved.
    """

    loss: Tensor
    penalty: Tensor
    grad_norm: Tensor
    tokens: Tensor
    finite: Tensor


class StepLoss(nn.Module):
    """The flow from tokens to the weighted loss; a module, so that data-parallel hooks fire.

    Of `model` it uses `prelude`, `block`, `coda` and `head`.
    """

    def __init__(self, model: LoopedLM, config: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(
        self, batch: MicroBatch, plan: Plan, turns: int, window_tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The micro-batch's share of the step's loss, and of [token loss, penalty], no gradient.

        `window_tokens` is the number of supervised tokens of the whole window; summed over it the
        shares are the loss per supervised token and the penalty per sample.
        """
        model, config = self.model, self.config
        h = model.prelude(batch.tokens)
        states = run_turns(model.block, h, turns, config.train.backprop_turns)
        out = model.coda(states[-1])
        loss = token_loss(model.head, out, batch.positions, batch.labels) / window_tokens
        if plan.weight == 0.0:
            return loss, torch.stack([loss.detach(), torch.zeros_like(loss)])

        if config.penalised == "l2":
            penalty = adjacent_l2(states, batch.mask)
        else:
            v = sample_noise(states[-1], config.seed, plan.step, batch.first)
            penalty = fused_jsrr(
                model.block,
                states[-1],
                v=v,
                mask=batch.mask,
                power_steps=config.penalty.power_steps,
                normalize=config.penalty.normalize,
                detach=config.penalty.detach,
            )
        penalty = penalty * (len(batch.tokens) / config.train.batch_size)
        total = config.penalty.combine(loss, penalty, plan.weight)
        return total, torch.stack([loss.detach(), penalty.detach()])


def plan_step(config: TrainConfig, step: int) -> Plan:
    """The plan of `step`: a pure function of the configuration, the same on every rank."""
    window = config.train.accumulation
    seed = derive(config.seed, "depth")
    return Plan(
        step=step,
        turns=[config.depth.sample(seed, step, micro, window) for micro in range(window)],
        weight=config.penalty_weight(step),
        lr=learning_rate(config.optim, step, config.train.steps),
    )


def _reduction(step_loss: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Data-parallel processes reduce their gradients once a window, with its last micro-batch."""
    if isinstance(step_loss, DistributedDataParallel) and not now:
        return step_loss.no_sync()
    return nullcontext()


def train_step(
    step_loss: StepLoss | DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    window: list[MicroBatch],
    plan: Plan,
    world: World,
) -> StepStats:
    """One optimiser step on the micro-batches `window` of this rank; nothing waits for the device.

    A loss or gradient that is not finite leaves the weights, on every rank alike.
    """
    supervised = sum(len(batch.labels) for batch in window)
    window_tokens = world.sum_(torch.tensor(supervised, device=world.device)).clamp(min=1)
    shares = torch.zeros(2, device=world.device)
    optimizer.zero_grad(set_to_none=True)
    for turns, batch in zip(plan.turns, window, strict=True):
        seed_dropout(config.seed, plan.step, batch.index, world.device)
        with _reduction(step_loss, now=batch is window[-1]):
            loss, share = step_loss(batch, plan, turns, window_tokens)
            (loss * world.size).backward()  # data-parallel reduction averages; shares add up
        shares = shares + share
    real = torch.tensor([sum(batch.real_tokens for batch in window)], device=world.device)
    sums = world.sum_(torch.cat([shares, real.to(shares.dtype)]))
    norm = gradient_norm(step_loss, config.optim.clip)
    finite = sums.isfinite().all() & norm.isfinite()
    step_if(optimizer, finite, plan.lr)
    return StepStats(sums[0], sums[1], norm, sums[2], finite)
