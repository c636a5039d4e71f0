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
    sizes = zip(primal.stride(), primal.shape, strict=True)
    shared = any(step == 0 and size > 1 for step, size in sizes)
    usual = tuple(range(primal.dim())) if order is None else order
    if shared or (order is not None and primal.permute(order).is_contiguous()):
        memory = torch.stack((primal.permute(usual), tangent.permute(usual))).contiguous()
        if shared and not torch.compiler.is_compiling():
            _remember(memory, primal.permute(usual).stride())
        return memory, functools.partial(_shifted, order=_inverse(usual))
    span = 1 + sum(
        step * (size - 1) for step, size in zip(primal.stride(), primal.shape, strict=True)
    )
    memory = primal.new_empty(2 * span)
    arrange = functools.partial(
        torch.as_strided,
        size=(2, *primal.shape),
        stride=(span, *primal.stride()),
        storage_offset=0,
    )
    stack = arrange(memory)
    stack[0].copy_(primal)
    stack[1].copy_(tangent)
    return memory, arrange


# Rows of an expanded primal move apart and get memory of their own, which lies as that of eager's
# elementwise results; whether eager copies is asked of the strides that the primal had.
_some_expanded = False


def some_expanded() -> bool:
    """Whether any primal was expanded: where none was, nobody has to ask on."""
    return _some_expanded


def _remember(memory: Tensor, strides: tuple[int, ...]) -> None:
    """Of the memory of a pair: its own strides, and those of the primal that it was made of."""
    global _some_expanded
    _some_expanded = True
    memory.untyped_storage().expanded = tuple(zip(memory.stride()[1:], strides, strict=True))  # type: ignore[attr-defined]


def seen_by_eager(stack: Tensor) -> Tensor | None:
    """A meta tensor with the strides that the primal of a stack has in eager, where it is a view of
    an expanded tensor; None where they are its own."""
    if not _some_expanded:
        return None
    expanded = getattr(stack.untyped_storage(), "expanded", None)
    if expanded is None:
        return None
    strides = []
    for rest in stack.stride()[1:]:
        stride = 0
        for own, primal in expanded:  # from the slowest: a diagonal steps in several dimensions
            steps, rest = divmod(rest, own)
            stride += steps * primal
        strides.append(stride)
    return torch.empty_strided(stack.shape[1:], strides, dtype=stack.dtype, device="meta")


def _as_it_is(stack: Tensor) -> Tensor:
    return stack


def in_memory_order(op: Callable[[Tensor], Tensor], stack: Tensor) -> Tensor:
    """`op(stack)` for an op that works element by element and returns contiguous memory, in the
    order that eager's result has."""
    order = None if stack.is_contiguous() else order_of(stack[0])
    if order is None:
        return op(stack)
    return _shifted(op(_shifted(stack, order)), _inverse(order))


def in_order(stack: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """`stack` with both halves dense in memory, their dimensions in this order (None: as they are),
    copied only where they are not."""
    if order is None:
        return stack.contiguous()
    return _shifted(_shifted(stack, order).contiguous(), _inverse(order))


def _shifted(stack: Tensor, order: tuple[int, ...]) -> Tensor:
    return stack.permute(0, *(dim + 1 for dim in order))


def is_channels_last(x: Tensor) -> bool:
    """Whether torch's norms and joins take [N, C, ...] for channels last: by its strides alone,
    with gaps or without."""
    if x.dim() not in (4, 5) or x.stride(1) == 0:
        return False
    least = 0
    for dim in (1, *reversed(range(2, x.dim())), 0):
        if x.stride(dim) < least or (dim == 0 and least == x.stride(1)):
            return False
        least = x.stride(dim) * max(x.shape[dim], 1)
    return True


def overlaps(x: Tensor) -> bool:
    """Whether two elements of x may share memory, as in an expanded tensor or a sliding window."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
