"""Why the turns of a run can't be CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from stars_fast.models.families import family_named
from stars_fast.training.graphs.recorder import recorder_for
from stars_fast.training.step.methods import METHODS

CAPTURED_ATTENTION = ("sdpa", "eager")


def reason_against(config: Any) -> str | None:
    """Why no device could capture the turns of the run of a `RunConfig`; None where one might."""
    family = family_named(config.model.family)
    attention = getattr(config.model, "attention", "sdpa")
    penalty, loop = config.penalty, config.loop
    dual = config.penalised and METHODS[config.method].penalty(config).needs_dual
    found = {
        f"parallel.kind {config.parallel.kind} gathers weights anew": config.parallel.sharded,
        "train.compile is true": config.train.compile,
        f"the layers of model.family {family.name} are another's code": not family.captures,
        f"model.attention {attention} is another's code": attention not in CAPTURED_ATTENTION,
        "loop.noise is drawn before every turn": loop.noise > 0,
        "loop.progressive adds turns": loop.progressive > 0,
        "penalty.power_steps asks for random states": dual and penalty.power_steps > 1,
        "penalty.draw samples cuts other samples out each time": dual
        and penalty.draw == "samples"
        and penalty.fraction < 1.0,
    }
    return next((why for why, holds in found.items() if holds), None)


def reason_on(device: torch.device) -> str | None:
    """Why a device captures nothing; None where it does."""
    return None if recorder_for(device) else f"the device is {device.type}, which has no graphs"
