"""The kinds of micro-batches of a run, and which of them come often enough to be captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stars_fast.training.config import RunConfig

MOST = 24
"""Pairs of a run at most: each is some ten thousand kernels that CUDA keeps in memory."""

FEWEST = 8
"""Micro-batches for which a pair is worth its capture, which takes as long as two or three."""


class Key(NamedTuple):
    """The micro-batches that one pair of graphs serves: by turns, and whether they have the
    penalty."""

    turns: int
    penalised: bool


def chances(config: RunConfig) -> dict[Key, float]:
    """The micro-batches of a run by kind, as parts of all of them; those of a depth curriculum
    count as after it."""
    steps, window = config.train.total_steps, config.train.accumulation
    part = 0.0
    if config.penalised:
        part = config.penalty.micro_batches(window) / window
        part *= max(steps - config.penalty.start_step, 0) / steps
    found = {}
    for turns, chance in config.depth.chances(steps):
        for penalised, share in ((True, part), (False, 1 - part)):
            if chance * share > 0:
                found[Key(turns, penalised)] = chance * share
    return found


def worth_capturing(config: RunConfig, fewest: int = FEWEST) -> frozenset[Key]:
    """The kinds of micro-batches that come so often in the run, the most frequent `MOST` of
    them."""
    number = config.train.total_steps * config.train.accumulation
    found = chances(config)
    often = [key for key in found if found[key] * number >= fewest]
    return frozenset(sorted(often, key=lambda key: -found[key])[:MOST])
