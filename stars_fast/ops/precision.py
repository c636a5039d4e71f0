"""Where ops compute: row statistics and attention in fp32 for 16-bit inputs, autocast off."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = (torch.float16, torch.bfloat16)


def widen(x: Tensor) -> Tensor:
    """fp16 and bf16 as fp32; any other dtype unchanged."""
    return x.float() if x.dtype in _LOW else x


def no_autocast(x: Tensor) -> torch.autocast:
    """A region in which matmuls run in the dtype they are given."""
    return torch.autocast(x.device.type, enabled=False)
