"""Tensors that a block makes and then fills: `torch.zeros(...)`, then `copy_`, `index_add_` or an
assignment of what depends on h.

While a pass runs, a torch function mode notes what the block's own calls of factories return, and
the views of it. The first value with a tangent that is written into such a tensor turns it, and its
views, into Duals with one stack between them. A tensor from outside of the pass, such as a buffer,
is not turned: it would keep a tangent beyond the pass.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stars_fast.dual.lazy import before_write
from stars_fast.dual.registry import objects_named
from stars_fast.dual.tensor import Dual, is_ordinary

_MAKERS = frozenset(
    target
    for name in """
    zeros ones empty full rand randn zeros_like ones_like empty_like full_like rand_like randn_like
    new_zeros new_ones new_empty new_full empty_strided eye clone repeat tile
    """.split()
    for target in objects_named(name)
)

_count_modes = torch._C._len_torch_function_stack
_local = threading.local()


class FreshTensors(TorchFunctionMode):
    """Notes the tensors that are made inside, with their views."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, list[weakref.ref[Tensor]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # Straight to the rules, unless a mode of the user's is to see the call first.
        ordinary = Dual in types and all(kind is Dual or is_ordinary(kind) for kind in types)
        if ordinary and not _count_modes():
            return Dual.__torch_function__(func, types, args, kwargs)
        before_write(func)
        result = func(*args, **(kwargs or {}))
        if func in _MAKERS:
            self._note(result, made=True)
        elif self._made:
            for each in result if isinstance(result, (tuple, list)) else (result,):
                self._note(each, made=False)
        return result

    def __enter__(self) -> FreshTensors:
        self._outer, _local.mode = getattr(_local, "mode", None), self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _local.mode = self._outer
        super().__exit__(*error)

    def _note(self, tensor: Any, made: bool) -> None:
        if type(tensor) is not Tensor or not tensor.is_floating_point() or not tensor.numel():
            return
        place = tensor.untyped_storage().data_ptr()
        if made:
            self._made[place] = [weakref.ref(tensor)]
        elif place in self._made:
            self._made[place].append(weakref.ref(tensor))

    def turn(self, target: Tensor) -> bool:
        """Make Duals of a tensor that was made here and of its views; False for another tensor."""
        alive = [ref() for ref in self._made.get(target.untyped_storage().data_ptr(), ())]
        family = [tensor for tensor in alive if tensor is not None]
        if not any(tensor is target for tensor in family):
            return False
        root = target if target._base is None else target._base
        if not root.is_contiguous() or root.storage_offset() or root.dtype != target.dtype:
            return False
        del self._made[target.untyped_storage().data_ptr()]
        stack = torch.stack((root, torch.zeros_like(root)))
        with torch.no_grad():
            root.detach().fill_(torch.nan)  # this memory is not read any more: a slip shows
        for tensor in family:
            shape, stride = (2, *tensor.shape), (root.numel(), *tensor.stride())
            whole = tensor.shape == root.shape and tensor.stride() == root.stride()
            _become_dual(
                tensor, stack if whole else stack.as_strided(shape, stride, tensor.storage_offset())
            )
        return True


def _become_dual(tensor: Tensor, stack: Tensor) -> None:
    tensor.__class__ = Dual
    tensor.stack = stack  # type: ignore[attr-defined]
    tensor.turned = True  # type: ignore[attr-defined]


def is_recomputing() -> bool:
    """Whether no pass runs in this thread: a Dual met then is in a recomputed region."""
    return getattr(_local, "mode", None) is None


def turn_fresh(target: Any) -> bool:
    """Make a Dual of a plain tensor, in place, where the running pass made it."""
    mode = getattr(_local, "mode", None)
    return mode is not None and type(target) is Tensor and mode.turn(target)
