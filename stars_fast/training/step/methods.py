"""The training methods by name: all that the files in `penalties/` offer."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from stars_fast.training.step import penalties
from stars_fast.training.step.penalties.base import Method, NoPenalty, Penalty
from stars_fast.training.step.settings import StepSettings


def _offered() -> dict[str, Method]:
    found: dict[str, Method] = {}
    for module in iter_modules(penalties.__path__, f"{penalties.__name__}."):
        found |= getattr(import_module(module.name), "METHODS", {})
    return found


METHODS = _offered()


def penalty_of(config: StepSettings) -> Penalty:
    """The penalty that a run has, which with a weight of 0 is none."""
    return (
        METHODS[config.method].penalty(config) if config.penalty.weight > 0 else NoPenalty(config)
    )
