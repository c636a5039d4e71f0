"""In which numbers a run keeps its weights and in which it computes.

mixed      weights, gradients and averages in fp32, the model in bf16
float32    all in fp32
bfloat16   all in bf16
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from stars_fast.models.loop import Loop
from stars_fast.models.low_layers import LowLayers

if TYPE_CHECKING:
    from stars_fast.training.config import RunConfig

PRECISIONS = ("mixed", "float32", "bfloat16")


def parameter_dtype(precision: str) -> torch.dtype:
    """The dtype of the parameters that the optimiser moves.

    Raises:
        ValueError: what is not one of `PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def autocast(precision: str, device: torch.device, sharded: bool) -> AbstractContextManager:
    """Around the forward of a micro-batch.

    Autocast where precision is "mixed", except on `sharded` weights (fsdp, hsdp): their layers
    gather bf16 copies. One such context around all turns casts each weight once, not once a turn.
    """
    if precision != "mixed" or sharded:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def low_layers(loop: Loop, config: RunConfig) -> LowLayers:
    """Copies in bf16 of the weights that the turns multiply with; of none where autocast does not
    cast them, or layers are compiled."""
    mixed = config.precision == "mixed" and not config.parallel.sharded
    return LowLayers(loop.model, loop.turn_modules if mixed and not config.train.compile else [])


def rounding_warning(precision: str, stochastic_rounding: bool, lr: float) -> str | None:
    """A warning of what weights in bf16 that are rounded to nearest lose; None where nothing is.

    AdamW moves a weight w by about lr. Numbers in bf16 have 8 significant bits: from 2^e to
    2^(e + 1) they lie 2^(e - 7) apart, and a step of less than half of that is lost.
    """
    if precision != "bfloat16" or stochastic_rounding:
        return None
    return (
        f"precision bfloat16 without optim.stochastic_rounding: a step of about lr = {lr:g} is "
        f"rounded away on every weight larger than {512 * lr:.1g} or so; use precision mixed or "
        "optim.stochastic_rounding"
    )
