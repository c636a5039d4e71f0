"""Exact match on unseen sums at any number of turns."""

from collections.abc import Sequence

import torch

from stars_fast.data.addition import IGNORE, AdditionData
from stars_fast.models.looped import LoopedLM


@torch.no_grad()
def evaluate(
    model: LoopedLM,
    data: AdditionData,
    turns: Sequence[int],
    limit: int = 1000,
    batch_size: int = 500,
) -> dict[int, float]:
    """Share of unseen sums whose greedy generation is exactly the answer, at each of `turns`.

    Greedy generation gives exactly the answer if and only if, with the answer as input, every
    answer token and the end token is the argmax at its place; so one pass over max(turns) turns,
    read at each of `turns`, is the whole sweep.
    """
    model.eval()
    count = min(limit, len(data.test))
    right = dict.fromkeys(turns, 0)
    for start in range(0, count, batch_size):
        batch = data.batch("test", torch.arange(start, min(start + batch_size, count)))
        h = model.prelude(batch.tokens)
        for turn in range(1, max(turns) + 1):
            h = model.block(h)
            if turn in right:
                best = model.head(model.coda(h)).argmax(-1)
                hit = (best == batch.targets) | (batch.targets == IGNORE)
                right[turn] += int(hit.all(1).sum())
    return {turn: right[turn] / count for turn in turns}
