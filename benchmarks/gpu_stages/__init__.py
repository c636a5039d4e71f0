"""The stages of `gpu_check.py`, in the order of what they are worth on a lent GPU.

A stage is a function of (report, device, small) that adds an entry as soon as it has one. It tries
each thing by `report.attempt`, so that what fails takes nothing else with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.gpu_stages import (
    addition,
    checks,
    designs,
    norms,
    operations,
    published,
    smoke,
    steps,
    tiles,
    turns,
)
from benchmarks.gpu_stages.report import Report


class Stage(NamedTuple):
    """A function, its share of the time, and whether it needs the build of the CUDA kernels."""

    run: Callable[[Report, str, bool], None]
    share: float
    built: bool = False


STAGES = {
    # These two compile most of the kernels, and fail where they skip something: what they leave of
    # their time is that of the stages after them.
    "smoke": Stage(smoke.smoke, 90),
    "kernels": Stage(checks.kernels, 110),
    "turns": Stage(turns.turns, 75),
    "steps": Stage(steps.steps, 115),
    "norms": Stage(norms.norms, 25, built=True),
    "ops": Stage(operations.operations, 40),
    "designs": Stage(designs.designs, 25),
    "tiles": Stage(tiles.tiles, 35),
    "addition": Stage(addition.addition, 50),
    "published": Stage(published.published, 40),
    "dtypes": Stage(checks.dtypes, 120),
}
EXTRA = ("dtypes",)
"""Only if asked for."""
