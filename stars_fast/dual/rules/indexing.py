"""Reading and writing parts of a Dual by an index."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.in_place import check_writable
from stars_fast.dual.layout import stack_pair
from stars_fast.dual.rule import rule
from stars_fast.dual.tensor import Dual, align, primal_of


def _is_basic(index: tuple) -> bool:
    return all(
        item is None
        or item is Ellipsis
        or isinstance(item, slice)
        or (isinstance(item, int) and not isinstance(item, bool))
        for item in index
    )


def _plain_index(index: Any) -> tuple:
    """An index as a tuple, without tangents; scalar integers of any kind as int, as in torch, where
    they give a view."""
    items = index if isinstance(index, tuple) else (index,)
    return tuple(_plain_item(primal_of(item)) for item in items)


def _plain_item(item: Any) -> Any:
    if isinstance(item, Tensor):
        integer = not (item.is_floating_point() or item.dtype == torch.bool)
        return int(item) if item.dim() == 0 and integer else item
    if isinstance(item, bool):
        return item
    try:
        return operator.index(item)
    except TypeError:  # no integer: a slice, a list, an array of several elements
        return item


@rule("__getitem__", kind="stacked")
def getitem(input: Any, index: Any) -> Any:
    index = _plain_index(index)
    if type(input) is not Dual:
        return input[index]
    if _is_basic(index):
        shifted = (slice(None), *index)
        return Dual(input.stack[shifted])
    # Advanced indices may move dimensions to the front: take each half by itself.
    return Dual(stack_pair(input.stack[0][index], input.stack[1][index]))


@rule("__setitem__", kind="in-place")
def setitem(input: Any, index: Any, value: Any) -> None:
    check_writable("__setitem__", input)
    index = _plain_index(index)
    if not _is_basic(index):
        primal, tangent = (value.stack[0], value.stack[1]) if type(value) is Dual else (value, 0)
        input.stack[0][index] = primal
        input.stack[1][index] = tangent
        return
    shifted = (slice(None), *index)
    place = input.stack[shifted]
    if type(value) is not Dual:
        place[0][...] = value
        place[1].zero_()
    elif not _is_same_memory(place, value.stack):
        place.copy_(_fitted(value.stack, place.dim()))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both are one and the same view: `x[i] += y` writes, then assigns what it wrote."""
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.data_ptr() == b.data_ptr()
    )


def _fitted(stack: Tensor, ndim: int) -> Tensor:
    """A stack for assignment to one of `ndim` dimensions: torch ignores leading ones."""
    while stack.dim() > ndim and stack.shape[1] == 1:
        stack = stack.squeeze(1)
    return align(stack, ndim - 1)
