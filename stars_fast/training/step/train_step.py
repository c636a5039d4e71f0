"""The training step on one page.

    tokens -> prelude -> turns [primal ... primal] -> coda -> head -> token loss --+
                                      |                                            +-> loss
                                   h^(t) -> dual turn -> Jacobian penalty ---------+

`StepLoss` is one micro-batch's share of the loss; `train_step` sums the shares of a window, over
micro-batches and ranks, and moves the weights. The penalty drawn here is the Jacobian's; with
`penalty.at` "last" its dual turn is the last of the turns. `loop_config` has what may change the
turns, and the loss after further ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stars_fast.base.seeds import derive, seed_dropout
from stars_fast.data.batches import MicroBatch
from stars_fast.models.loop import Loop
from stars_fast.training.config import RunConfig
from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.flat_gradients import FlatGradients
from stars_fast.training.scale.parallel import gradient_sync
from stars_fast.training.step.cost import turns_in_graph
from stars_fast.training.step.methods import penalty_of
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.optim import gradient_norm, learning_rate, step_if
from stars_fast.training.step.penalties.base import NoPenalty, Penalty
from stars_fast.training.step.precision import autocast, low_layers
from stars_fast.training.step.turns import KEEP_ALL, Recompute

T = TypeVar("T")


class StepPlan(NamedTuple):
    """A step before it runs: its number, the turns of each micro-batch, lambda, learning rate."""

    step: int
    turns: list[int]
    weight: float
    lr: float


class StepStats(NamedTuple):
    """The outcome of a step, as scalars on the device, equal on every rank.

    loss: token loss per supervised token. penalty: mean over samples, 0 without one. grad_norm:
    before clipping. finite: whether the weights moved. tokens: real tokens, known on the host.
    """

    loss: Tensor
    penalty: Tensor
    grad_norm: Tensor
    tokens: int
    finite: Tensor


Between = Callable[[MicroStep, int, Penalty], tuple[Tensor, Tensor]]
"""h^(t) [B, S, D] after so many turns, and the penalty, a scalar."""


def run_between(micro: MicroStep, turns: int, penalty: Penalty) -> tuple[Tensor, Tensor]:
    """The turns and the penalty, op by op; as `Between`."""
    states = micro.turns(turns - penalty.last_turns, run_later=penalty.last_turns)
    return penalty.compute(micro, states)


class StepLoss(nn.Module):
    """A micro-batch's way from tokens to the weighted loss.

    A module, so that data-parallel hooks fire, and sharded weights are there while it runs.

    Attributes:
        penalty: the run's.
        recompute: gives what is recomputed in the backward pass, by the number of plain turns in
            the graph and whether a dual turn follows from the penalty.
        between: runs what lies between prelude and head; `run_between`, or a graph of it.
        gradients: where the gradients stay, if they do: then nothing wraps this module.
        low: the 16-bit copies of the weights of the turns, where the run has them.
    """

    def __init__(self, loop: Loop, config: RunConfig) -> None:
        super().__init__()
        self.loop = loop
        self.config = config
        self.penalty = penalty_of(config)
        self.recompute: Callable[[int, bool], Recompute] = lambda turns, dual: KEEP_ALL
        self.between: Between = run_between
        self.gradients: FlatGradients | None = None
        self.low = low_layers(loop, config)

    def forward(
        self, batch: MicroBatch, plan: StepPlan, turns: int, window_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """The micro-batch's share of the step's loss, and of [token loss, penalty], no gradient.

        `window_tokens` is the number of supervised tokens of the whole window; summed over it the
        shares are the loss per supervised token and the penalty per sample.
        """
        factor = self.penalty.factor(batch, plan.step) if plan.weight > 0 else 0.0
        penalty = self.penalty if factor > 0 else NoPenalty(self.config)
        in_graph = turns_in_graph(self.config, turns, factor > 0)
        recompute = self.recompute(in_graph, penalty.needs_dual)

        micro = MicroStep(self.loop, batch, self.config, plan.step, recompute)
        h, value = self.between(micro, turns, penalty)
        loss = self.loop.token_loss(h, batch, window_tokens)

        value = value * (factor * batch.share)
        shares = torch.stack([loss.detach(), value.detach()])
        change = self.config.loop
        if change.progressive > 0:
            place = batch.index * self.config.train.accumulation // batch.step_micro_batches
            free = change.drawn_turns(self.config.seed, plan.step, place)
            deep = micro.further(h.detach(), change.graph_turns, free)
            deeper = self.loop.token_loss(deep, batch, window_tokens)
            loss = (1 - change.progressive) * loss + change.progressive * deeper
        if plan.weight > 0:
            loss = self.config.penalty.combine(loss, value, plan.weight)
        return loss, shares

    def with_weights(self, work: Callable[..., T], *args: Any) -> T:
        """`work(loop, *args)` while the weights are there, also where they are sharded; then every
        process must call it alike."""
        return work(self.loop, *args)


def root_of(step_loss: nn.Module) -> StepLoss:
    """The `StepLoss` itself, perhaps sharded, for its `with_weights`."""
    root = step_loss.module if isinstance(step_loss, DistributedDataParallel) else step_loss
    assert isinstance(root, StepLoss)
    return root


def plan_step(config: RunConfig, step: int) -> StepPlan:
    """The plan of `step`: a pure function of the configuration, the same on every rank."""
    window = config.train.accumulation
    seed = derive(config.seed, "depth")
    return StepPlan(
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
    plan: StepPlan,
    world: World,
) -> StepStats:
    """One optimiser step on the micro-batches `window` of this rank; nothing waits for the device.

    `step_loss` is a `StepLoss`, perhaps made parallel; with `gradients` of its own it is not, and
    they are averaged over the processes here. A loss or gradient that is not finite leaves
    the weights, on every rank alike.
    """
    supervised = sum(len(batch.labels) for batch in window)
    real = sum(batch.real_tokens for batch in window)
    supervised, real = world.total([supervised, real])
    shares = torch.zeros(2, device=world.device)
    low, gradients = root_of(step_loss).low, root_of(step_loss).gradients
    if gradients is None:
        optimizer.zero_grad(set_to_none=True)
    else:
        gradients.zero()
    low.refresh()
    for turns, batch in zip(plan.turns, window, strict=True):
        seed_dropout(config.seed, plan.step, batch.index, world.device)
        with low.used(), gradient_sync(step_loss, now=batch is window[-1]):
            with autocast(config.precision, world.device, config.parallel.sharded):
                loss, share = step_loss(batch, plan, turns, max(supervised, 1))
            (loss * world.size).backward()  # data-parallel reduction averages; shares add up
        del loss  # its graph holds nodes of this stream, which a capture can't wait for
        shares = shares + share
    if gradients is not None:
        gradients.average(world)
    shares = world.sum_(shares)
    norm = gradient_norm(step_loss, config.optim.clip).to(world.device)
    finite = shares.isfinite().all() & norm.isfinite()
    step_if(optimizer, finite, plan.lr)
    return StepStats(shares[0], shares[1], norm, real, finite)
