"""Adaptive depth on the addition task: exact match against turns taken.

Sums are judged in one pass over the true answer, as in `evaluation.addition`. Per token that is
what greedy generation gives: a token rests by what stands before it alone. Per sequence the whole
sum, answer included, rests at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stars_fast.data.batches import Source
from stars_fast.evaluation.addition import exact, first_batches
from stars_fast.models.adaptive import Per, turns_until_rest
from stars_fast.models.loop import Loop, Turn
from stars_fast.tokens import Tokens


class Point(NamedTuple):
    """accuracy: in [0, 1]. turns: mean over all real tokens. at_limit: share of the real tokens
    that had not come to rest before the last turn allowed."""

    accuracy: float
    turns: float
    at_limit: float


@torch.no_grad()
def evaluate_adaptive(
    loop: Loop,
    sums: Source,
    tols: Sequence[float],
    limit_turns: int = 100,
    per: Per = "token",
    limit: int = 1000,
    batch_size: int = 500,
) -> dict[float, Point]:
    """Exact match on the first `limit` of some sums by tolerance, at most `limit_turns` turns.

    Dropout is off, whatever mode the model is in, and the sums go to the model's device.

    Raises:
        ValueError: `tols` is empty or a number is out of range, named.
    """
    if not tols:
        raise ValueError("tols: expected a tolerance at least, got none")
    was_training = loop.model.training
    loop.model.eval()
    found = {}
    try:
        for tol in tols:
            right = taken = stuck = tokens = count = 0
            for batch in first_batches(loop, sums, limit, batch_size):
                h, inputs = loop.begin(batch.tokens, batch.samples)
                everything = torch.ones(h.shape[:2], dtype=torch.bool)
                real = everything if batch.samples.real is None else batch.samples.real
                real = real.to(h.device)
                turn_of = partial(_turn_of, loop, batch.samples, h, inputs)
                h, turns = turns_until_rest(turn_of, h, limit_turns, tol, per, real)
                taken_here = turns[real]
                right += exact(loop, h, batch)
                taken += int(taken_here.sum())
                stuck += int((taken_here == limit_turns).sum())
                tokens += len(taken_here)
                count += len(batch.tokens)
            found[tol] = Point(right / count, taken / tokens, stuck / tokens)
    finally:
        loop.model.train(was_training)
    return found


def _turn_of(
    loop: Loop, samples: Tokens, h: Tensor, inputs: Tensor | None, rows: Tensor | None
) -> Turn:
    """One turn of the sequences `rows` [b] int64 of a batch; None for all."""
    if rows is None:
        return loop.turn(h, samples, inputs)
    part = samples.subset(rows.tolist())
    return loop.turn(part.cut(h), part.tokens, None if inputs is None else part.cut(inputs))
