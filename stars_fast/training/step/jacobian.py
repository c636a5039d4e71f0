"""The Jacobian penalty of a micro-batch: after the last turn, or sharing the last turn's pass.

    "next"   h^(t) -> one more turn, dual: the paper's
    "last"   h^(t-1) -> the last turn, dual: its primal output is h^(t), which saves a turn

With `penalty.fraction` a part of the samples goes through the dual pass, drawn anew each step.
Drawn from the samples it is as many in each micro-batch of each rank (all that there are where it
holds fewer), so that none waits long for another; their mean stands for that over all samples of
the micro-batch, which is its expected value. Drawn from the micro-batches it is all samples of
some, the same ones of the window on every rank, and their penalty counts for the others'.
"""

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stars_fast.base.seeds import derive
from stars_fast.data.batches import MicroBatch
from stars_fast.data.samples import (
    draw_samples,
    drawn_number,
    sample_noise,
)
from stars_fast.jsrr import fused_jsrr
from stars_fast.models.loop import Loop, Turn
from stars_fast.tokens import Subset, put_together
from stars_fast.training.config import RunConfig
from stars_fast.training.step.turns import Block, Recompute, by_layer, dual_block


def penalty_at_next(
    loop: Loop,
    turn: Turn,
    states: list[Tensor],
    batch: MicroBatch,
    config: RunConfig,
    step: int,
    recompute: Recompute,
) -> Tensor:
    """Mean over the samples of ||J v||^2 at the last of the `states`, h^(t) [B, S, D]; `turn` is
    the batch's."""
    part = drawn(batch, config, step)
    return _penalty(
        loop, turn, states, batch, part, config, step, recompute, detach=config.penalty.detach
    )


def penalty_at_last(
    loop: Loop,
    turn: Turn,
    states: list[Tensor],
    batch: MicroBatch,
    config: RunConfig,
    step: int,
    recompute: Recompute,
) -> tuple[Tensor, Tensor]:
    """h^(t) [B, S, D], and the mean over the samples of ||J v||^2 at the last of the `states`,
    h^(t-1) [B, S, D]; `turn` is the batch's."""
    part = drawn(batch, config, step)
    arguments = loop, turn, states, batch, part, config, step, recompute
    out, penalty = _penalty(*arguments, detach=False, return_output=True)
    if part is None:
        return out, penalty
    rest = batch.samples.subset(sorted(set(range(batch.samples.count)) - set(part.chosen)))
    others = rest.cut(states[-1])
    others = _block(loop, loop.turn(others, rest.tokens), recompute)(others)
    return put_together([(part, out), (rest, others)], states[-1].shape), penalty


def direction(states: list[Tensor], config: RunConfig) -> Tensor | None:
    """v [B, S, D] at the last of the `states`, cut off from the graph; None for a random one, also
    where a single state leaves no step to take."""
    if config.penalty.direction == "random" or len(states) == 1:
        return None
    return states[-1].detach() - states[-2].detach()


def penalty_factor(batch: MicroBatch, config: RunConfig, step: int) -> float:
    """What the penalty of the micro-batch counts for: 1, or where micro-batches are drawn their
    number over that of those drawn, and 0 for the others."""
    if config.penalty.draw == "samples":
        return 1.0
    window = config.train.accumulation
    number = config.penalty.micro_batches(window)
    chosen = random.Random(derive(config.seed, "micro-batches", step)).sample(range(window), number)
    place = batch.index * window // batch.step_micro_batches
    return window / number if place in chosen else 0.0


def drawn(batch: MicroBatch, config: RunConfig, step: int) -> Subset | None:
    """The samples of the micro-batch that go through the dual pass; None for all."""
    if config.penalty.draw == "micro-batches":
        return None
    number = drawn_number(config.penalty.fraction, batch.step_samples / batch.step_micro_batches)
    if config.penalty.fraction == 1.0 or number >= batch.samples.count:
        return None
    chosen = draw_samples(batch.samples.count, number, config.seed, step, batch.index)
    return batch.samples.subset(chosen)


def _penalty(
    loop: Loop,
    turn: Turn,
    states: list[Tensor],
    batch: MicroBatch,
    part: Subset | None,
    config: RunConfig,
    step: int,
    recompute: Recompute,
    **options: Any,
) -> Any:
    """`fused_jsrr` at the last of the `states`, of the whole batch or of a part of it; `turn` is
    the batch's."""
    h, v = states[-1], direction(states, config)
    if options["detach"]:
        h = h.detach()
    samples = batch.samples
    chosen: Sequence[int] = range(samples.count)
    if part is not None:
        samples, chosen = part.tokens, part.chosen
        h, v = part.cut(h), None if v is None else part.cut(v)
        turn = loop.turn(h, samples)
    if v is None:
        numbers = [batch.first + i for i in chosen]
        v = sample_noise(h, samples, config.seed, step, numbers)
    mask = samples.real
    return fused_jsrr(
        _block(loop, turn, recompute),
        h,
        v=v,
        mask=None if mask is None else mask.to(h.device, non_blocking=True),
        cu_seqlens=samples.cu_seqlens,
        power_steps=config.penalty.power_steps,
        normalize=config.penalty.normalize,
        **options,
    )


def _block(loop: Loop, turn: Turn, recompute: Recompute) -> Block:
    """The turn, with its layers recomputed if the dual turn's are."""
    return dual_block(turn, recompute, by_layer(turn, loop.model) if recompute.dual else None)
