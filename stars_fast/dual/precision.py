"""Where rules out of several ops compute: in fp32 for 16 bits, so that they round once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stars_fast.dual.tensor import Dual
from stars_fast.ops.precision import widen


def widened(x: Any) -> Any:
    """A Dual or tensor of 16 bits in fp32; anything else unchanged."""
    if type(x) is Dual:
        wide = widen(x.stack)
        return x if wide is x.stack else Dual(wide)
    return widen(x) if isinstance(x, Tensor) else x
