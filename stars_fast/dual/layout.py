"""Memory order: a result lies in memory as eager's does.

`contiguous`, `reshape` and `view` alias their input, copy it or fail by its strides. Were the
primal of a result laid out otherwise than eager's, a later in-place write would reach other tensors
than in eager, so every rule keeps eager's order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def order_of(x: Tensor) -> tuple[int, ...] | None:
    """Order of x's dimensions, slowest first, in the memory of an elementwise result of x; None for
    the usual order."""
    if x.is_contiguous() or x.numel() == 0:
        return None
    find = _order if torch.compiler.is_compiling() else _known_order
    return find(x.shape, x.stride())


def _order(shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, ...] | None:
    likeness = torch.empty_strided(shape, stride, device="meta")
    strides = torch.empty_like(likeness).stride()
    order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
    return None if order == tuple(range(len(shape))) else order


_known_order = functools.lru_cache(4096)(_order)  # torch takes longer to say than many an op


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
    if overlaps(primal):
        return _pack_expanded(primal, tangent)
    order = order_of(primal)
    if order is not None and primal.permute(order).is_contiguous():
        halves = torch.stack((primal.permute(order), tangent.permute(order)))
        return halves, functools.partial(_shifted, order=_inverse(order))
    reach = zip(primal.stride(), primal.shape, strict=True)
    span = 1 + sum(step * (size - 1) for step, size in reach)
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


@torch._disable_dynamo  # compilers can't say what memory is
def _pack_expanded(primal: Tensor, tangent: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`pack_pair` of a primal whose elements share memory. Its rows move apart and get memory of
    their own, which lies as that of eager's elementwise results; what eager sees is remembered."""
    order = order_of(primal) or tuple(range(primal.dim()))
    memory = torch.stack((primal.permute(order), tangent.permute(order))).contiguous()
    strides = zip(memory.stride()[1:], primal.permute(order).stride(), strict=True)
    _expanded.set(memory, tuple(strides))
    frozen.set(memory, "expand")
    return memory, functools.partial(_shifted, order=_inverse(order))


class _Marks(Generic[_T]):
    """Knowledge of the memory of tensors, while it lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], _T]] = {}

    def set(self, x: Tensor, known: _T) -> None:
        try:
            storage = x.untyped_storage()
        except NotImplementedError as error:  # it has none of its own
            raise RuntimeError(
                "stars_fast: h or what a block makes of it: expected tensors whose elements lie "
                "apart inside torch.vmap, got an expanded one; call contiguous() on it first"
            ) from error
        key = id(storage)
        forget = weakref.ref(storage, lambda _: self._known.pop(key, None))
        self._known[key] = forget, known

    def get(self, x: Tensor) -> _T | None:
        if not self._known:
            return None
        return self._known.get(id(x.untyped_storage()), (None, None))[1]

    def __len__(self) -> int:
        return len(self._known)


frozen: _Marks[str] = _Marks()
"""Memory that may not be written: the op that made a view of it here or in eager alone."""

# Memory of expanded primals: for each dimension, slowest first, its stride there and in eager.
_expanded: _Marks[tuple[tuple[int, int], ...]] = _Marks()


def some_expanded() -> bool:
    """Whether a primal that was expanded is alive: where none is, nobody has to ask on."""
    return len(_expanded) > 0


def seen_by_eager(stack: Tensor) -> Tensor | None:
    """A meta tensor with the strides that the primal of a stack has in eager, where it is a view of
    an expanded tensor; None where they are its own."""
    expanded = _expanded.get(stack) if some_expanded() else None
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


def in_eager(stack: Tensor) -> Tensor:
    """The primal of a stack; where eager sees other strides, a meta tensor with those."""
    seen = seen_by_eager(stack)
    return stack[0] if seen is None else seen


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


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether torch's norms and joins take [N, C, ...] for channels last: by its strides alone,
    with gaps or without."""
    if len(shape) not in (4, 5) or stride[1] == 0:
        return False
    least = 0
    for dim in (1, *reversed(range(2, len(shape))), 0):
        if stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * max(shape[dim], 1)
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
