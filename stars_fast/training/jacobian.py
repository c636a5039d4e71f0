"""The Jacobian penalty of a micro-batch: after the last turn, or sharing the last turn's pass.

    "next"   h^(t) -> one more turn, dual: the paper's
    "last"   h^(t-1) -> the last turn, dual: its primal output is h^(t), which saves a turn

With `penalty.fraction` a part of the samples goes through the dual pass, drawn anew each step: as
many in each micro-batch of each rank (all that there are where it holds fewer), so that none waits
long for another. Their mean stands for that over all samples of the micro-batch, which is its
expected value.
"""

from typing import Any

from torch import Tensor

from stars_fast.jsrr import fused_jsrr
from stars_fast.training.batches import MicroBatch
from stars_fast.training.config import RunConfig
from stars_fast.training.loop import Loop, Turn
from stars_fast.training.samples import Part, draw_samples, drawn_number, join, sample_noise
from stars_fast.training.turns import Block, Recompute, by_layer, dual_block


def penalty_at_next(
    loop: Loop,
    turn: Turn,
    h: Tensor,
    batch: MicroBatch,
    config: RunConfig,
    step: int,
    recompute: Recompute,
) -> Tensor:
    """Mean over the samples of ||J v||^2 at h = h^(t) [B, S, D]; `turn` is the batch's."""
    if config.penalty.detach:
        h = h.detach()
    part = drawn(batch, config, step)
    if part is not None:
        h = part.of(h)
        turn = loop.turn(h, part.samples)
    return _penalty(
        loop, turn, h, batch, part, config, step, recompute, detach=config.penalty.detach
    )


def penalty_at_last(
    loop: Loop,
    turn: Turn,
    h: Tensor,
    batch: MicroBatch,
    config: RunConfig,
    step: int,
    recompute: Recompute,
) -> tuple[Tensor, Tensor]:
    """h^(t) [B, S, D], and the mean over the samples of ||J v||^2 at h = h^(t-1) [B, S, D]; `turn`
    is the batch's."""
    shared = {"detach": False, "return_output": True}
    part = drawn(batch, config, step)
    if part is None:
        return _penalty(loop, turn, h, batch, None, config, step, recompute, **shared)
    some = part.of(h)
    turn = loop.turn(some, part.samples)
    out, penalty = _penalty(loop, turn, some, batch, part, config, step, recompute, **shared)
    rest = batch.samples.take(sorted(set(range(batch.samples.count)) - set(part.chosen)))
    others = rest.of(h)
    others = _block(loop, loop.turn(others, rest.samples), recompute)(others)
    return join([(part, out), (rest, others)], h.shape), penalty


def drawn(batch: MicroBatch, config: RunConfig, step: int) -> Part | None:
    """The samples that go through the dual pass; None for all."""
    number = drawn_number(config.penalty.fraction, batch.step_samples / batch.pieces)
    if config.penalty.fraction == 1.0 or number >= batch.samples.count:
        return None
    chosen = draw_samples(batch.samples.count, number, config.seed, step, batch.index)
    return batch.samples.take(chosen)


def _penalty(
    loop: Loop,
    turn: Turn,
    h: Tensor,
    batch: MicroBatch,
    part: Part | None,
    config: RunConfig,
    step: int,
    recompute: Recompute,
    **options: Any,
) -> Any:
    """`fused_jsrr` at the states `h` of the batch, or of a part of it."""
    samples = batch.samples if part is None else part.samples
    chosen = range(samples.count) if part is None else part.chosen
    numbers = [batch.first + i for i in chosen]
    mask = samples.mask
    return fused_jsrr(
        _block(loop, turn, recompute),
        h,
        v=sample_noise(h, samples, config.seed, step, numbers),
        mask=None if mask is None else mask.to(h.device, non_blocking=True),
        cu_seqlens=samples.cu_seqlens,
        power_steps=config.penalty.power_steps,
        normalize=config.penalty.normalize,
        **options,
    )


def _block(loop: Loop, turn: Turn, recompute: Recompute) -> Block:
    """The turn, with its layers recomputed if the dual turn's are."""
    return dual_block(turn, recompute, by_layer(turn, loop.model) if recompute.dual else None)
