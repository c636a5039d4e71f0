"""In-place ops: the result is written into the stack, so that views of it see the change too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stars_fast.dual.layout import frozen
from stars_fast.dual.pass_mode import is_recomputing, turn_fresh
from stars_fast.dual.tensor import Dual


def check_writable(name: str, target: Any) -> None:
    """Raise unless `target` is a Dual whose stack may be written, or can be made one."""
    if type(target) is not Dual and not turn_fresh(target):
        way_out = "allocate the tensor inside the block"
        if is_recomputing():
            way_out = (
                "in a checkpointed region, allocate the tensor with zeros_like or new_zeros of one "
                "that depends on h"
            )
        raise RuntimeError(
            f"stars_fast: in-place {name} would write a value with a tangent into a plain tensor, "
            f"which can't hold it; use the out-of-place form, or {way_out}"
        )
    view = frozen.get(target.stack)
    if view is not None:
        raise RuntimeError(
            f"stars_fast: in-place {name} on a tensor that shares memory through {view!r}, for "
            "which no view rule exists; clone it first"
        )


def assign(name: str, target: Dual, result: Any) -> Dual:
    """Write `result` (a Dual, or a value without a tangent) into `target` and return `target`."""
    check_writable(name, target)
    if isinstance(result, torch.Tensor) and result.shape != target.shape:
        raise RuntimeError(
            f"stars_fast: in-place {name}: result of shape {list(result.shape)} does not fit "
            f"into {list(target.shape)}"
        )
    if type(result) is Dual:
        target.stack.copy_(result.stack)
    else:
        if isinstance(result, torch.Tensor):
            target.stack[0].copy_(result)
        else:
            target.stack[0].fill_(result)
        target.stack[1].zero_()
    return target


def in_place_form(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """The in-place form of a rule. It works on a copy of the stack: what the rule saves for its
    backward must survive the write."""

    @functools.wraps(handler)
    def apply(input: Any, *args: Any, **kwargs: Any) -> Dual:
        check_writable(name, input)
        return assign(name, input, handler(Dual(input.stack.clone()), *args, **kwargs))

    return apply
