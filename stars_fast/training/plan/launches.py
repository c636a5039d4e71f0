"""The host in a plan: whether the turns are CUDA graphs, and else how long rows must be for the GPU
to be the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stars_fast.data.kinds import kind_named
from stars_fast.models.families import family_named
from stars_fast.training.graphs.kinds import chances, worth_capturing
from stars_fast.training.graphs.reasons import reason_against
from stars_fast.training.plan.otherwise import otherwise

ROWS = range(1024, 16385, 1024)
"""Lengths of rows that are tried."""


def why_no_graphs(config: Any) -> str | None:
    """Why the turns of the run would be no graphs on a GPU; None if they would."""
    if config.train.graphs == "off":
        return "train.graphs is off"
    kind = kind_named(config.data.kind)
    alike = (
        kind.packs(config.data) or kind.sample(config.data) or not hasattr(config.data, "samples")
    )
    if config.train.graphs == "auto" and not alike:
        return "rows are of many lengths (data.packing true fills them)"
    return reason_against(config)


def captured_part(config: Any, steps: int | None) -> float:
    """The part of the micro-batches that replay a graph, of a run of so many steps."""
    if why_no_graphs(config) is not None:
        return 0.0
    if steps is None:
        return 1.0
    config = replace(config, train=replace(config.train, steps=steps, epochs=None))
    found = chances(config)
    fewest = {"fewest": 0} if config.train.graphs == "on" else {}
    return sum(found[key] for key in worth_capturing(config, **fewest))


def row_for_the_gpu(config: Any, waits: Callable[[Any], bool]) -> int | None:
    """The least length of packed rows, of `ROWS`, at which the GPU does not wait for the host; None
    where the data or the model don't pack, or none does."""
    if not hasattr(config.data, "row_length") or not family_named(config.model.family).packs:
        return None
    longest = config.data.max_length
    for length in (longest, *(each for each in ROWS if each > longest)):
        changed = otherwise(config, {"data": {"packing": True, "row_length": length}})
        if changed is not None and not waits(changed):
            return length
    return None
