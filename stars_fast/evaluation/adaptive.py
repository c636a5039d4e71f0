"""What adaptive depth costs and keeps on the addition task: exact match against turns taken.

Sums are judged in one pass over the true answer, as in `evaluation.addition`. Per token that is
what greedy generation gives: a token rests by what stands before it alone. Per sequence the whole
sum, answer included, rests at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from stars_fast.data.addition import IGNORE, AdditionData
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
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    count = min(limit, len(data.test))
    found = {}
    for tol in tols:
        right = taken = stuck = tokens = 0
        for start in range(0, count, batch_size):
            batch = data.batch("test", torch.arange(start, min(start + batch_size, count)))
            targets, real = batch.targets.to(device), batch.mask.to(device)
            h = model.prelude(batch.tokens.to(device))
            h, turns = turns_until_rest(model.block, h, limit_turns, tol, per, real)
            guess = model.head(model.coda(h)).argmax(-1)
            right += int(((guess == targets) | (targets == IGNORE)).all(1).sum())
            taken += int(turns[real].sum())
            stuck += int((turns[real] == limit_turns).sum())
            tokens += int(real.sum())
        found[tol] = Point(right / count, taken / tokens, stuck / tokens)
    model.train(was_training)
    return found
