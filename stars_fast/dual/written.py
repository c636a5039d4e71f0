"""Values that a block writes through `.data` or `.detach()` into what is not its own.

An average that a module keeps of its states, such as a code book: autograd and forward mode see
nothing of the write, and what the tensor held is read as a constant then as before. Only the tensor
that was cut off, through which it went, has a derivative afterwards in eager.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map

from stars_fast.dual.registry import may_write, objects_named
from stars_fast.dual.running import settle_all, state
from stars_fast.dual.tensor import FORM, QUICK, primal_of

CUTS = frozenset(target for name in ("data", "detach") for target in objects_named(name))
"""Functions that cut a tensor off from its derivative and share its memory."""


class Written(Tensor):
    """A tensor that was cut off, and its views, after a value with a tangent was written there."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if args and type(args[0]) is Written and may_write(func):
            return write_values(func, args, kwargs or {})
        if state.running is None or func in CUTS or func in FORM or func in QUICK:
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f"stars_fast: {resolve_name(func) or func} reads what .data or detach() gave of a "
            "tensor from outside of the block, after a value with a tangent was written there: "
            "read the tensor itself, whose values are constants, or compute out of place"
        )


def write_values(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an op that writes, on primals."""
    settle_all()
    args, kwargs = tree_map(primal_of, (args, kwargs))
    cut_off = type(args[0]) is Written
    with torch.no_grad(), torch._C.DisableTorchFunction() if cut_off else nullcontext():
        return func(*args, **kwargs)
