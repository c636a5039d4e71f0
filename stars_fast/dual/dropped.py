"""Where a block makes a number of a tensor with a tangent: said once per place.

`x * x.mean().item()` is a product with a constant: its derivative lacks a part. Torch allows it,
and so does this package, but with a warning at the line of the block that did it, and a line in
`explain`. `detach()` says the same on purpose and is silent; so are `bool`, comparisons, `int` and
printing, which have no derivative to lose.
"""

from __future__ import annotations

import warnings

import torch

from stars_fast.dual.caller import frame_outside
from stars_fast.dual.registry import report
from stars_fast.dual.tensor import Dual


class TangentDropped(UserWarning):
    """A number or tensor made from a tensor with a tangent has none."""


def dropped(name: str, x: Dual, waits: bool = True) -> None:
    """Warn at the caller's line that `name` loses x's tangent, unless that is exactly zero.

    With `waits=False`, for what does not wait for the device itself, a tangent on another device
    than the CPU is not looked at.
    """
    tangent = x.stack[1]
    looks = waits or tangent.device.type == "cpu"
    if looks and not torch.any(tangent != 0):
        return
    frame = frame_outside("torch", "stars_fast")
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    report(f"{name} at {where}", "dropped")
    warnings.warn_explicit(
        f"stars_fast: {name} of a tensor with a tangent gives a constant: its derivative by h goes "
        "missing in what is computed from it; keep the tensor, or detach() where a constant is "
        "meant",
        TangentDropped,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
