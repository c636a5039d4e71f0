"""Exact match on unseen sums against the number of turns, the paper's measure of the addition task.

A sum counts if greedy generation gives the whole answer and the end token. That is so if and only
if, with the true answer as input, every one of those tokens is the argmax at its place: greedy
decoding sees the true prefix for as long as it has made no mistake. So generation is not needed,
and as the turns are shared, one pass over the deepest number of turns, read by the head at each
number asked for, is the whole sweep: 1..100 turns cost 100 turns, not 5,050.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stars_fast.data.addition import IGNORE, AdditionData, Batch
from stars_fast.models.looped import LoopedLM


@torch.no_grad()
def evaluate(
    model: LoopedLM,
    data: AdditionData,
    turns: Sequence[int],
    limit: int = 1000,
    batch_size: int = 500,
) -> dict[int, float]:
    """Share of the first `limit` unseen sums answered exactly, in [0, 1], at each of `turns`.

    The order of `turns` is kept in the result. Dropout is off, whatever mode the model is in, and
    the sums go to the model's device.

    Raises:
        ValueError: `turns` is empty or holds anything but positive integers, or if `limit` or
            `batch_size` is not positive.
    """
    if not turns or any(not isinstance(t, int) or t < 1 for t in turns):
        raise ValueError(f"turns must be integers >= 1, got {list(turns)}")
    was_training = model.training
    model.eval()
    right, count = dict.fromkeys(turns, 0), 0
    try:
        for batch in unseen(model, data, limit, batch_size):
            h = model.prelude(batch.tokens)
            for turn in range(1, max(turns) + 1):
                h = model.block(h)
                if turn in right:
                    right[turn] += exact(model, h, batch)
            count += len(batch.tokens)
    finally:
        model.train(was_training)
    return {turn: hits / count for turn, hits in right.items()}


def unseen(model: LoopedLM, data: AdditionData, limit: int, batch_size: int) -> Iterator[Batch]:
    """The first `limit` unseen sums in batches, on the model's device.

    Raises:
        ValueError: `limit` or `batch_size` is not positive.
    """
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    device = next(model.parameters()).device
    count = min(limit, len(data.test))
    for start in range(0, count, batch_size):
        batch = data.batch("test", torch.arange(start, min(start + batch_size, count)))
        yield Batch(*(part.to(device) for part in batch))


def exact(model: LoopedLM, h: Tensor, batch: Batch) -> int:
    """How many sums of a batch are answered exactly from the state h [B, S, D]."""
    guess = model.head(model.coda(h)).argmax(-1)
    return int(((guess == batch.targets) | (batch.targets == IGNORE)).all(1).sum())
