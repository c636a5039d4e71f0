"""Rotary embeddings known by the ops they call: x cos + rotate_half(x) sin, as one op.

`rotate_half` joins minus the second half of the last dimension with the first. Its steps and the
two products wait (`steps.py`), and the sum runs the fused op. Tables are [B or 1, 1, S, D], as
`unsqueeze_dim=1` gives them; any other arrangement runs as written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast import ops
from stars_fast.dual.recognition.steps import (
    check_held,
    complete,
    dtype_of,
    is_open,
    is_plain,
    recorder,
    shape_of,
    step_of,
    wait,
)
from stars_fast.dual.tensor import Dual


def _half_shape(x: Dual) -> torch.Size:
    shape = shape_of(x)
    return torch.Size((*shape[:-1], shape[-1] // 2))


def _may_turn(x: Any) -> bool:
    """Whether x is [B, H, S, D] with D even. What x waits for runs now: no formula goes on in a
    rotation."""
    if not is_open(x) or len(shape_of(x)) != 4 or shape_of(x)[-1] % 2:
        return False
    if x.step is not None:
        x.step.settle(x)
    return True


@recorder("__getitem__")
def follow_half(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    """x[..., : D / 2] and x[..., D / 2 :]."""
    x, index = args
    if not _may_turn(x) or type(index) is not tuple or len(index) != 2:
        return None
    middle, part = x.stack.shape[-1] // 2, index[1]
    if index[0] is not Ellipsis or type(part) is not slice or part.step is not None:
        return None
    bounds = part.start, part.stop
    if bounds in ((None, middle), (0, middle)):
        kind = "first half"
    elif bounds in ((middle, None), (middle, 2 * middle)):
        kind = "second half"
    else:
        return None
    return wait(kind, x, (func, args, kwargs), shape=_half_shape(x))


@recorder("chunk")
def follow_halves(func: Any, args: tuple, kwargs: dict) -> Any:
    """x.chunk(2, -1)."""
    x = args[0]
    given = dict(zip(("chunks", "dim"), args[1:], strict=False), **kwargs)
    if not _may_turn(x) or given not in ({"chunks": 2, "dim": -1}, {"chunks": 2, "dim": 3}):
        return None
    middle = x.stack.shape[-1] // 2
    parts = (slice(None, middle), slice(middle, None))
    return tuple(torch.Tensor.__getitem__(x, (..., part)) for part in parts)


@recorder("neg", "negative", "__neg__")
def follow_negative(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    step = step_of(args[0], "second half")
    if step is None:
        return None
    return wait("-second half", args[0], (func, args, kwargs), value=step.of)


@recorder("cat", "concat", "concatenate")
def follow_joined_halves(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    given = dict(zip(("tensors", "dim"), args, strict=False), **kwargs)
    tensors = given.get("tensors")
    if not isinstance(tensors, (tuple, list)) or len(tensors) != 2 or given.keys() - _CAT:
        return None
    second, first = step_of(tensors[0], "-second half"), step_of(tensors[1], "first half")
    if second is None or first is None or given.get("dim") not in (-1, 3):
        return None
    x = first.of
    if second.value is not x:
        return None
    return wait("turned", tensors[1], (func, args, kwargs), value=x, shape=shape_of(x))


_CAT = {"tensors", "dim"}


@recorder("mul", "multiply", "__mul__", "__rmul__")
def follow_table_product(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    """x cos, or rotate_half(x) sin."""
    if len(args) != 2 or kwargs:
        return None
    x, table = args if type(args[0]) is Dual else args[::-1]
    if not is_plain(table) or table.dim() != 4 or table.requires_grad:
        return None
    turned = step_of(x, "turned")
    if turned is None and not _may_turn(x):
        return None
    source = x if turned is None else turned.value
    batch, _, length, width = shape_of(source)
    if table.shape not in ((1, 1, length, width), (batch, 1, length, width)):
        return None
    if torch.promote_types(table.dtype, dtype_of(x)) != dtype_of(x):
        return None
    kind = "x cos" if turned is None else "turned sin"
    return wait(kind, x, (func, args, kwargs), value=(source, table), uses=table)


@recorder("add", "__add__")
def follow_rotation(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    if len(args) != 2 or kwargs:
        return None
    even, odd = step_of(args[0], "x cos"), step_of(args[1], "turned sin")
    if even is None or odd is None:
        return None
    (x, cos), (y, sin) = even.value, odd.value
    if x is not y or cos.dtype != sin.dtype or cos.shape != sin.shape:
        return None
    check_held(even)
    check_held(odd)
    return _rotate(x, cos.squeeze(1), sin.squeeze(1))


def _rotate(x: Dual, cos: Tensor, sin: Tensor) -> Dual:
    stack = ops.rotary(x.stack, cos, sin)
    if x.stack.is_contiguous():  # the op writes the memory order [S, H] of projections
        stack = stack.contiguous()
    return complete("rotary", "rotary embedding", stack, (x,))
