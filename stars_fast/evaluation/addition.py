"""Exact match on unseen sums against the number of turns, the paper's measure of the addition task.

A sum counts if greedy generation gives the whole answer and the end token. That is so if and only
if, with the true answer as input, every one of those tokens is the argmax at its place: greedy
decoding sees the true prefix for as long as it has made no mistake. So generation is not needed,
and as the turns are shared, one pass over the deepest number of turns, read by the head at each
number asked for, is the whole sweep: 1..100 turns cost 100 turns, not 5,050.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from stars_fast.data.batches import MicroBatch, Source, micro_batch, to_device
from stars_fast.data.kinds import OpenData
from stars_fast.models.loop import Loop


@torch.no_grad()
def evaluate(
    loop: Loop,
    sums: Source,
    turns: Sequence[int],
    limit: int = 1000,
    batch_size: int = 500,
) -> dict[int, float]:
    """Share of the first `limit` of some sums answered exactly, in [0, 1], at each of `turns`.

    The order of `turns` is kept in the result. Dropout is off, whatever mode the model is in, and
    the sums go to the model's device.

    Raises:
        ValueError: `turns` is empty or holds anything but positive integers, or `limit` or
            `batch_size` is not positive.
    """
    if not turns or any(not isinstance(t, int) or t < 1 for t in turns):
        raise ValueError(f"turns: expected integers >= 1, got {list(turns)}")
    was_training = loop.model.training
    loop.model.eval()
    right, count = dict.fromkeys(turns, 0), 0
    try:
        for batch in first_batches(loop, sums, limit, batch_size):
            h, inputs = loop.begin(batch.tokens, batch.samples)
            block = loop.turn(h, batch.samples, inputs)
            for turn in range(1, max(turns) + 1):
                h = block(h)
                if turn in right:
                    right[turn] += exact(loop, h, batch)
            count += len(batch.tokens)
    finally:
        loop.model.train(was_training)
    return {turn: hits / count for turn, hits in right.items()}


def judged_on(data: OpenData) -> dict[str, Source]:
    """Unseen samples by the name of their figure: accuracy, and where a kind has further ones that
    with theirs, such as accuracy_2x."""
    assert data.held_out is not None
    further = {f"accuracy_{name}": source for name, source in data.further.items()}
    return {"accuracy": data.held_out, **further}


def first_batches(loop: Loop, sums: Source, limit: int, batch_size: int) -> Iterator[MicroBatch]:
    """The first `limit` sums in batches, on the model's device.

    Raises:
        ValueError: `limit` or `batch_size` is not positive.
    """
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}: expected >= 1, got {value}")
    device = next(loop.parameters()).device
    count = min(limit, len(sums))
    for start in range(0, count, batch_size):
        units = np.arange(start, min(start + batch_size, count))
        yield to_device(micro_batch(sums, units), device)


def exact(loop: Loop, h: Tensor, batch: MicroBatch) -> int:
    """How many sums of a batch are answered exactly from the state h [B, S, D]."""
    guess = loop.logits(h).argmax(-1).flatten()[batch.positions]
    wrong = (batch.positions // h.shape[1])[guess != batch.labels]
    return len(batch.tokens) - len(wrong.unique())
