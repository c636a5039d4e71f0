"""One dual pass: any block, one stack in, one stack out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.fresh import FreshTensors
from stars_fast.dual.modules import adopt, modules_of
from stars_fast.dual.scope import dual_scope
from stars_fast.dual.tensor import Dual, check_history, primal_of
from stars_fast.ops.spans import masks_of_one_pass


@torch.compiler.disable
def dual_pass(
    block: Callable[..., Any], stack: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """Run `block(Dual(stack), *args, **kwargs)` and return the stack of its first output.

    Args:
        block: module or callable; a tuple, list, mapping or model output counts by its first
            element.
        stack: [2, *h.shape], primal and tangent.

    Returns:
        [2, *output.shape].

    Raises:
        TypeError: the block returned no tensor, or one that does not depend on its input.
    """
    adopt(block)
    try:
        with dual_scope(), masks_of_one_pass(), FreshTensors():
            output = first_output(block(Dual(stack), *args, **kwargs))
    finally:
        release(block)
    if type(output) is not Dual:
        raise TypeError(
            "block: expected its (first) output to be a tensor that depends on h, got "
            + (
                f"a constant tensor of shape {list(output.shape)}: was it detached or rebuilt?"
                if isinstance(output, Tensor)
                else type(output).__name__
            )
        )
    check_history(output)
    return output.stack


def release(block: Any) -> None:
    """Leave no Dual behind on the modules of a block: what a forward stored there, such as a running
    mean or an auxiliary loss, becomes its primal."""
    for module in modules_of(block):
        for held in (module.__dict__, module._buffers):
            for key, value in held.items():
                if type(value) is Dual:
                    held[key] = value.stack[0]
                elif type(value) in _CONTAINERS and value:
                    held[key] = _primals(value)


_CONTAINERS = (list, tuple, dict)


def _primals(value: Any) -> Any:
    """A container with the primals of its Duals; the same object where it can be written."""
    if type(value) is dict:
        value.update({k: v.stack[0] for k, v in value.items() if type(v) is Dual})
    elif any(type(each) is Dual for each in value):
        parts = [primal_of(each) for each in value]
        if type(value) is tuple:
            return tuple(parts)
        value[:] = parts
    return value


def first_output(output: Any) -> Any:
    """The tensor a block's output counts by."""
    while not isinstance(output, Tensor):
        if isinstance(output, dict) and output:
            output = next(iter(output.values()))
        elif isinstance(output, (tuple, list)) and output:
            output = output[0]
        else:
            break
    return output
