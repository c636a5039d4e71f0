"""Memory order: a result lies in memory as eager's does.

`contiguous`, `reshape` and `view` alias their input, copy it or fail by its strides. Were the
primal of a result laid out otherwise than eager's, a later in-place write would reach other tensors
than in eager, so every rule keeps eager's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def order_of(x: Tensor) -> tuple[int, ...] | None:
    """Order of x's dimensions, slowest first, in the memory of an elementwise result of x; None for
    the usual order."""
    if x.is_contiguous() or x.numel() == 0:
        return None
    likeness = torch.empty_strided(x.shape, x.stride(), device="meta")
    strides = torch.empty_like(likeness).stride()
    order = tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))
    return None if order == tuple(range(x.dim())) else order


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def stack_pair(primal: Tensor, tangent: Tensor) -> Tensor:
    """[2, *shape] of two tensors of one shape, in the memory order of `primal`."""
    memory, arrange = pack_pair(primal, tangent)
    return arrange(memory)


def pack_pair(primal: Tensor, tangent: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The memory of `stack_pair`, and what makes the stack of it: an autograd.Function returns the
    first, since torch refuses later writes into a view that was made inside one."""
    if primal.is_contiguous() or primal.numel() == 0:
        return torch.stack((primal, tangent)), _as_it_is
    order = order_of(primal)
    if order is not None and primal.permute(order).is_contiguous():
        halves = torch.stack((primal.permute(order), tangent.permute(order)))
        return halves, functools.partial(_shifted, order=_inverse(order))
    span, strides = _strides_with_gaps(primal)
    memory = primal.new_empty(2 * span)
    arrange = functools.partial(
        torch.as_strided, size=(2, *primal.shape), stride=(span, *strides), storage_offset=0
    )
    stack = arrange(memory)
    stack[0].copy_(primal)
    stack[1].copy_(tangent)
    return memory, arrange


def _strides_with_gaps(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """Elements from the first to the last, and strides of memory that is contiguous where x is: x's
    own; an expanded dimension, which a pair can't share, gets memory that no reshape can merge with
    its neighbours."""
    strides = list(x.stride())
    span = 1 + sum(step * (size - 1) for step, size in zip(strides, x.shape, strict=True))
    for dim in reversed(range(x.dim())):
        if strides[dim] == 0 and x.shape[dim] > 1:
            strides[dim] = span + 1
            span += strides[dim] * (x.shape[dim] - 1)
    return span, tuple(strides)


def _as_it_is(stack: Tensor) -> Tensor:
    return stack


def in_memory_order(op: Callable[[Tensor], Tensor], stack: Tensor) -> Tensor:
    """`op(stack)` for an op that works element by element and returns contiguous memory, in the
    order that eager's result has."""
    order = None if stack.is_contiguous() else order_of(stack[0])
    if order is None:
        return op(stack)
    return _shifted(op(_shifted(stack, order)), _inverse(order))


def _shifted(stack: Tensor, order: tuple[int, ...]) -> Tensor:
    return stack.permute(0, *(dim + 1 for dim in order))


def overlaps(x: Tensor) -> bool:
    """Whether two elements of x may share memory, as in an expanded tensor or a sliding window."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
