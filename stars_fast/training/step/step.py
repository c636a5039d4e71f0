"""The training step on one page.

    tokens -> prelude -> turns [primal ... primal] -> coda -> head -> token loss --+
                                      |                                            +-> loss
                                   h^(t) -> dual turn -> Jacobian penalty ---------+

With `penalty.at` "last" the dual turn is the last of the turns.

`StepLoss` is one micro-batch's share of the loss; `train_step` sums the shares of a window, over
micro-batches and ranks, and moves the weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stars_fast.base.seeds import derive, seed_dropout
from stars_fast.data.batches import MicroBatch
from stars_fast.jsrr import fused_jsrr
from stars_fast.models.loop import Loop
from stars_fast.training.config import RunConfig
from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.memory import Activations, measure_activations
from stars_fast.training.scale.parallel import gradient_sync
from stars_fast.training.step.jacobian import penalty_at_last, penalty_at_next, penalty_factor
from stars_fast.training.step.losses import adjacent_l2
from stars_fast.training.step.optim import gradient_norm, learning_rate, step_if
from stars_fast.training.step.precision import autocast
from stars_fast.training.step.turns import KEEP_ALL, Block, Recompute, by_layer, run_turns


class Plan(NamedTuple):
    """What a step does, known before it: its number, the turns of each micro-batch, lambda, lr."""

    step: int
    turns: list[int]
    weight: float
    lr: float


class StepStats(NamedTuple):
    """What a step did, as scalars on the device, equal on every rank.

    loss: token loss per supervised token. penalty: mean over samples, 0 without one. grad_norm:
    before clipping. finite: whether the weights moved. tokens: real tokens, known on the host.
    """

    loss: Tensor
    penalty: Tensor
    grad_norm: Tensor
    tokens: int
    finite: Tensor


class StepLoss(nn.Module):
    """The flow from tokens to the weighted loss.

    A module, so that data-parallel hooks fire, and sharded weights are there while it runs; it runs
    whatever it is called with: `step_loss(StepLoss.share, batch, plan, turns, tokens)`.

    recompute: what is recomputed in the backward pass, by the number of turns and whether there is
        a penalty.
    """

    def __init__(self, loop: Loop, config: RunConfig) -> None:
        super().__init__()
        self.loop = loop
        self.config = config
        self.recompute: Callable[[int, bool], Recompute] = lambda turns, penalised: KEEP_ALL

    def forward(self, do: Callable[..., Any], *args: Any) -> Any:
        """`do(self, *args)`."""
        return do(self, *args)

    def share(
        self, batch: MicroBatch, plan: Plan, turns: int, window_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """The micro-batch's share of the step's loss, and of [token loss, penalty], no gradient.

        `window_tokens` is the number of supervised tokens of the whole window; summed over it the
        shares are the loss per supervised token and the penalty per sample.
        """
        loop, config = self.loop, self.config
        kind = config.penalised if plan.weight > 0 else None
        factor = penalty_factor(batch, config, plan.step) if kind == "jacobian" else 1.0
        jacobian = kind == "jacobian" and factor > 0
        recompute = self.recompute(turns, jacobian)
        shares_last = jacobian and config.penalty.at == "last"
        kept = config.train.backprop_turns

        h = self.start(batch)
        turn = loop.turn(h, batch.samples)
        states = run_turns(
            turn,
            h,
            turns - shares_last,
            None if kept is None else kept - shares_last,
            recompute,
            by_layer(turn, loop.model) if recompute.turns else None,
        )
        h = states[-1]
        penalty = h.new_zeros((), dtype=torch.float32)
        if shares_last:
            h, penalty = penalty_at_last(loop, turn, states, batch, config, plan.step, recompute)
        elif jacobian:
            penalty = penalty_at_next(loop, turn, states, batch, config, plan.step, recompute)
        elif kind == "l2":
            penalty = adjacent_l2(states, batch.samples.real, batch.samples.cu_seqlens)
        loss = loop.token_loss(h, batch, window_tokens)
        penalty = penalty * (factor * batch.share)
        shares = torch.stack([loss.detach(), penalty.detach()])
        return (config.penalty.combine(loss, penalty, plan.weight) if kind else loss), shares

    def measure(self, batch: MicroBatch) -> Activations:
        """What the micro-batch keeps for the backward pass."""
        loop, samples = self.loop, batch.samples
        with torch.no_grad():
            turn = loop.turn(self.start(batch), samples)

        def dual(block: Block, h: Tensor) -> Tensor:
            mask = None if samples.real is None else samples.real.to(h.device)
            return fused_jsrr(block, h, mask=mask, cu_seqlens=samples.cu_seqlens)

        # Of a part of the samples the dual pass may now and then be that of the whole micro-batch.
        return measure_activations(
            loop.model,
            lambda: self.start(batch),
            turn,
            lambda h: loop.token_loss(h, batch, 1),
            dual if self.config.penalised == "jacobian" else None,
            by_layer(turn, loop.model),
        )

    def start(self, batch: MicroBatch) -> Tensor:
        """h^(0) [B, S, D], in the dtype that the turns compute in."""
        h = self.loop.prelude(batch.tokens)
        return h.to(torch.bfloat16) if self.config.precision == "mixed" else h


def root_of(step_loss: nn.Module) -> nn.Module:
    """The module to call outside of training steps: without the reduction of gradients, which would
    wait for a backward pass, and with its weights gathered."""
    return step_loss.module if isinstance(step_loss, DistributedDataParallel) else step_loss


def plan_step(config: RunConfig, step: int) -> Plan:
    """The plan of `step`: a pure function of the configuration, the same on every rank."""
    window = config.train.accumulation
    seed = derive(config.seed, "depth")
    return Plan(
        step=step,
        turns=[config.depth.sample(seed, step, micro, window) for micro in range(window)],
        weight=config.penalty_weight(step),
        lr=learning_rate(config.optim, step, config.train.total_steps),
    )


def train_step(
    step_loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    window: list[MicroBatch],
    plan: Plan,
    world: World,
) -> StepStats:
    """One optimiser step on the micro-batches `window` of this rank; nothing waits for the device.

    `step_loss` is a `StepLoss`, perhaps made parallel. A loss or gradient that is not finite leaves
    the weights, on every rank alike.
    """
    supervised = sum(len(batch.labels) for batch in window)
    real = sum(batch.real_tokens for batch in window)
    supervised, real = world.total([supervised, real])
    shares = torch.zeros(2, device=world.device)
    optimizer.zero_grad(set_to_none=True)
    for turns, batch in zip(plan.turns, window, strict=True):
        seed_dropout(config.seed, plan.step, batch.index, world.device)
        with gradient_sync(step_loss, now=batch is window[-1]):
            with autocast(config.precision, world.device, config.parallel.sharded):
                loss, share = step_loss(StepLoss.share, batch, plan, turns, max(supervised, 1))
            (loss * world.size).backward()  # data-parallel reduction averages; shares add up
        shares = shares + share
    shares = world.sum_(shares)
    norm = gradient_norm(step_loss, config.optim.clip).to(world.device)
    finite = shares.isfinite().all() & norm.isfinite()
    step_if(optimizer, finite, plan.lr)
    return StepStats(shares[0], shares[1], norm, real, finite)
