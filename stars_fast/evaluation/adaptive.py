"""Adaptive depth on the addition task: exact match against turns taken.

Sums are judged in one pass over the true answer, as in `evaluation.addition`. Per token that is
what greedy generation gives: a token rests by what stands before it alone. Per sequence the whole
sum, answer included, rests at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from stars_fast.data.addition import AdditionData
from stars_fast.evaluation.addition import exact, unseen
from stars_fast.models.adaptive import Per, turns_until_rest
from stars_fast.models.looped import LoopedLM


class Point(NamedTuple):
    """accuracy: in [0, 1]. turns: mean over all real tokens. at_limit: share of the real tokens
    that had not come to rest before the last turn allowed."""

    accuracy: float
    turns: float
    at_limit: float


@torch.no_grad()
def evaluate_adaptive(
    model: LoopedLM,
    data: AdditionData,
    tols: Sequence[float],
    limit_turns: int = 100,
    per: Per = "token",
    limit: int = 1000,
    batch_size: int = 500,
) -> dict[float, Point]:
    """Exact match on the first `limit` unseen sums by tolerance, at most `limit_turns` turns.

    Dropout is off, whatever mode the model is in, and the sums go to the model's device.

    Raises:
        ValueError: `tols` is empty or a number is out of range, named.
    """
    if not tols:
        raise ValueError("tols must hold a tolerance at least, got none")
    was_training = model.training
    model.eval()
    found = {}
    try:
        for tol in tols:
            right = taken = stuck = tokens = sums = 0
            for batch in unseen(model, data, limit, batch_size):
                h = model.prelude(batch.tokens)
                h, turns = turns_until_rest(model.block, h, limit_turns, tol, per, batch.mask)
                taken_here = turns[batch.mask]
                right += exact(model, h, batch)
                taken += int(taken_here.sum())
                stuck += int((taken_here == limit_turns).sum())
                tokens += len(taken_here)
                sums += len(batch.tokens)
            found[tol] = Point(right / sums, taken / tokens, stuck / tokens)
    finally:
        model.train(was_training)
    return found
