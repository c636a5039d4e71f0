"""Casts of weights to 16 bits, and sums of their gradients, counted as a step runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.add_.Tensor)


class Matrices(TorchDispatchMode):
    """Inside, what is done to tensors of the shapes of some matrices is counted.

    Attributes:
        found: "cast" to 16 bits, "sum" in 16 bits, "sum in fp32".
        bytes: that those read and write.
    """

    def __init__(self, matrices: Iterable[Tensor]) -> None:
        super().__init__()
        self._shapes = {tuple(each.shape) for each in matrices}
        self.found: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _aten._foreach_copy_.default:
            for low, weight in zip(*args[:2], strict=True):
                if low.dim() == 2:
                    self._note("cast", low, weight)
        elif isinstance(out, Tensor) and tuple(out.shape) in self._shapes:
            low = out.dtype in (torch.bfloat16, torch.float16)
            if func is _aten._to_copy.default and low:
                self._note("cast", args[0], out)
            elif func in _SUMS:
                self._note("sum" if low else "sum in fp32", *args[:2], out)
        return out

    def _note(self, name: str, *tensors: Tensor) -> None:
        self.found[name] += 1
        self.bytes[name] += sum(each.nbytes for each in tensors)

    def describe(self) -> str:
        """Casts, sums in 16 bits and in fp32, and the MB that all of them move."""
        counts = [self.found[name] for name in ("cast", "sum", "sum in fp32")]
        return f"{', '.join(map(str, counts))}: {sum(self.bytes.values()) / 1e6:.0f} MB"
