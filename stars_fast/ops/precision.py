"""Where ops compute: row statistics and attention in fp32 for 16-bit inputs, autocast off."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LOW = (torch.float16, torch.bfloat16)


def widen(x: Tensor) -> Tensor:
    """fp16 and bf16 as fp32; any other dtype unchanged."""
    return x.float() if x.dtype in _LOW else x


def in_dtype(op: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`op(x)` as `dtype`: x is cast before where that is wider, the result after where narrower."""
    if dtype is None or dtype == x.dtype:
        return op(x)
    return op(x.to(torch.promote_types(x.dtype, dtype))).to(dtype)


def no_autocast(x: Tensor) -> torch.autocast:
    """A region in which matmuls run in the dtype they are given."""
    return torch.autocast(x.device.type, enabled=False)
