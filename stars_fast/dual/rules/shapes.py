"""Ops that only move elements: the same op on the stack, dimensions shifted past the pair."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.dual.forward_ad import jvp
from stars_fast.dual.layout import frozen, in_eager, is_channels_last, seen_by_eager, stack_pair
from stars_fast.dual.registry import RULES, Rule, add_rule, objects_named
from stars_fast.dual.rule import rule
from stars_fast.dual.tensor import Dual, align, primal_of


def shift(dim: int, stack: Tensor, extra: int = 0) -> int:
    """A dimension of the primal as one of the stack; `extra` more are allowed, for new ones."""
    ndim = stack.dim() - 1 + extra
    if not -ndim <= dim < ndim:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], "
            f"but got {dim})"
        )
    return dim + 1 if dim >= 0 else dim


def sizes(args: tuple) -> tuple[int, ...]:
    """`(2, 3)` from f(2, 3), f((2, 3)) or f(torch.Size)."""
    if len(args) == 1 and isinstance(args[0], Sequence):
        return tuple(args[0])
    return args


def structural(
    *names: str, owners: Sequence[Any] = (torch, torch.Tensor)
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a rule on the stack that counts dimensions. A Dual of no dimensions, whose stack
    has one too many to count by, goes through torch's forward derivative."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        plain = next(objects_named(names[0], owners))

        @functools.wraps(handler)
        def apply(input: Dual, *args: Any, **kwargs: Any) -> Any:
            if input.stack.dim() == 1:
                return jvp(plain, names[0], (input, *args), kwargs)
            return handler(input, *args, **kwargs)

        rule(*names, kind="stacked", owners=owners)(apply)
        return handler

    return register


@rule("view", kind="stacked")
def view(input: Dual, *shape: Any) -> Dual:
    if shape and isinstance(shape[0], torch.dtype):
        raise RuntimeError("stars_fast: view(dtype) reinterprets bits and has no tangent")
    shape, likeness = sizes(shape), seen_by_eager(input.stack)
    if likeness is None:
        return Dual(input.stack.view(2, *shape))
    likeness.view(shape)  # or eager's error
    return _as_a_view(input, shape)


def _as_a_view(input: Dual, shape: Sequence[int]) -> Dual:
    """A view of an expanded tensor in eager; here it may be a copy, which, as that memory, may not
    be written."""
    result = Dual(input.stack.reshape(2, *shape))
    frozen.set(result.stack, "view")
    return result


@rule("view_as", kind="stacked")
def view_as(input: Any, other: Tensor) -> Any:
    return input.view(other.shape)


@rule("reshape", kind="stacked")
def reshape(input: Dual, *shape: Any, **kwargs: Any) -> Dual:
    return _reshaped(input, kwargs.get("shape") or sizes(shape))


def _reshaped(input: Dual, shape: Sequence[int]) -> Dual:
    """A view or a copy, as in eager."""
    likeness = seen_by_eager(input.stack)
    if likeness is None:
        return Dual(input.stack.reshape(2, *shape))
    try:
        likeness.view(shape)
    except RuntimeError:
        return Dual(input.stack.clone().reshape(2, *shape))
    return _as_a_view(input, shape)


@rule("reshape_as", kind="stacked")
def reshape_as(input: Any, other: Tensor) -> Any:
    return input.reshape(other.shape)


@rule("flatten", kind="stacked")
def flatten_rule(input: Dual, start_dim: int = 0, end_dim: int = -1) -> Dual:
    if input.stack.dim() == 1:
        return Dual(input.stack.unsqueeze(1))
    first, last = (shift(dim, input.stack) % input.stack.dim() for dim in (start_dim, end_dim))
    if first == last:
        return input
    shape = input.stack.shape
    merged = math.prod(shape[first : last + 1])
    return _reshaped(input, (*shape[1:first], merged, *shape[last + 1 :]))


@rule("ravel", kind="stacked")
def ravel(input: Dual) -> Dual:
    return contiguous(_reshaped(input, (-1,)))


@structural("unflatten")
def unflatten(input: Dual, dim: int, sizes: Any) -> Dual:
    return Dual(input.stack.unflatten(shift(dim, input.stack), sizes))


@structural("transpose", "swapaxes", "swapdims")
def transpose(input: Dual, dim0: int, dim1: int) -> Dual:
    return Dual(input.stack.transpose(shift(dim0, input.stack), shift(dim1, input.stack)))


@rule("t", kind="stacked")
def t(input: Dual) -> Dual:
    return Dual(input.stack.transpose(1, 2) if input.stack.dim() > 2 else input.stack[:])


@rule("T", kind="stacked")
def reverse_dims(input: Dual) -> Dual:
    return Dual(input.stack.permute(0, *range(input.stack.dim() - 1, 0, -1)))


@rule("mT", kind="stacked")
def matrix_transpose(input: Dual) -> Dual:
    if input.stack.dim() < 3:
        raise RuntimeError(f"mT needs at least 2 dimensions, got shape {list(input.shape)}")
    return Dual(input.stack.transpose(-2, -1))


@structural("permute")
def permute(input: Dual, *dims: Any, **kwargs: Any) -> Dual:
    order = kwargs.get("dims") or sizes(dims)
    ndim = input.stack.dim()
    return Dual(input.stack.permute(0, *(shift(dim, input.stack) % ndim for dim in order)))


def _register_turns() -> None:
    """t_ and the like: the same tensor with its dimensions in another order."""
    for name in "t transpose swapaxes swapdims squeeze unsqueeze".split():
        turned = getattr(torch.Tensor, name)

        def handler(input: Dual, *args: Any, _turned: Any = turned, **kwargs: Any) -> Dual:
            input.stack = _turned(input, *args, **kwargs).stack
            return input

        add_rule(f"{name}_", "in-place", handler)


_register_turns()


@structural("movedim", "moveaxis")
def movedim(input: Dual, source: Any, destination: Any) -> Dual:
    def moved(dims: Any) -> Any:
        return (
            shift(dims, input.stack)
            if isinstance(dims, int)
            else [shift(dim, input.stack) for dim in dims]
        )

    return Dual(input.stack.movedim(moved(source), moved(destination)))


@structural("squeeze")
def squeeze(input: Dual, *dim: Any, **kwargs: Any) -> Dual:
    if not dim and not kwargs:
        return Dual(input.stack.squeeze())
    dims = sizes((kwargs["dim"],) if "dim" in kwargs else dim)
    return Dual(input.stack.squeeze(tuple(shift(each, input.stack) for each in dims)))


@rule("unsqueeze", kind="stacked")
def unsqueeze(input: Dual, dim: int) -> Dual:
    return Dual(input.stack.unsqueeze(shift(dim, input.stack, 1)))


@rule("expand", "broadcast_to", kind="stacked")
def expand(input: Dual, *size: Any, **kwargs: Any) -> Dual:
    target = tuple(kwargs["size"]) if "size" in kwargs else sizes(size)
    return Dual(align(input.stack, len(target)).expand(2, *target))


@rule("broadcast_tensors", kind="stacked")
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    parts = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    shape = torch.broadcast_shapes(*(part.shape for part in parts))
    return tuple(part.expand(shape) for part in parts)


@rule("expand_as", kind="stacked")
def expand_as(input: Any, other: Tensor) -> Any:
    return input.expand(other.shape)


@rule("repeat", kind="stacked")
def repeat(input: Dual, *repeats: Any) -> Dual:
    times = sizes(repeats)
    return Dual(align(input.stack, len(times)).repeat(1, *times))


@structural("repeat_interleave")
def repeat_interleave(
    input: Dual, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Dual:
    stack = input.stack.flatten(1) if dim is None else input.stack
    axis = 1 if dim is None else shift(dim, input.stack)
    return Dual(stack.repeat_interleave(repeats, axis, output_size=output_size))


@structural("chunk")
def chunk(input: Dual, chunks: int, dim: int = 0) -> tuple[Dual, ...]:
    return tuple(map(Dual, input.stack.chunk(chunks, shift(dim, input.stack))))


@structural("split", "split_with_sizes")
def split(input: Dual, split_size: Any, dim: int = 0) -> tuple[Dual, ...]:
    return tuple(map(Dual, input.stack.split(split_size, shift(dim, input.stack))))


@structural("tensor_split")
def tensor_split(input: Dual, sections: Any, dim: int = 0) -> tuple[Dual, ...]:
    return tuple(map(Dual, input.stack.tensor_split(sections, shift(dim, input.stack))))


def _apart(parts: tuple[Tensor, ...], stack: Tensor, axis: int) -> tuple[Dual, ...]:
    """Parts of a stack as views of their own, which may be written to as those of unsafe_split."""
    ends = list(itertools.accumulate(part.shape[axis] for part in parts))
    sizes = [part.shape[axis] for part in parts]
    return tuple(
        Dual(stack.narrow(axis, end - size, size)) for end, size in zip(ends, sizes, strict=True)
    )


@structural("unsafe_chunk")
def unsafe_chunk(input: Dual, chunks: int, dim: int = 0) -> tuple[Dual, ...]:
    axis = shift(dim, input.stack)
    return _apart(input.stack.chunk(chunks, axis), input.stack, axis)


@structural("unsafe_split", "unsafe_split_with_sizes")
def unsafe_split(input: Dual, split_size: Any, dim: int = 0) -> tuple[Dual, ...]:
    axis = shift(dim, input.stack)
    return _apart(input.stack.split(split_size, axis), input.stack, axis)


def _register_splits() -> None:
    """hsplit and the like: tensor_split along the first, second or third dimension."""
    for name, least, axis in (("vsplit", 2, 0), ("hsplit", 1, 1), ("dsplit", 3, 2)):

        def handler(
            input: Dual, sections: Any, _name: str = name, _least: int = least, _axis: int = axis
        ) -> tuple[Dual, ...]:
            if input.dim() < _least:
                raise RuntimeError(
                    f"{_name}: input needs at least {_least} dimensions, got {input.dim()}"
                )
            axis = min(_axis, input.dim() - 1)
            if isinstance(sections, int) and input.shape[axis] % sections:
                raise RuntimeError(
                    f"{_name}: {sections} sections do not divide a size of {input.shape[axis]}"
                )
            return input.tensor_split(sections, axis)  # type: ignore[return-value]

        add_rule(name, "stacked", handler)


_register_splits()


@rule("atleast_1d", kind="stacked")
def atleast_1d(*tensors: Any) -> Any:
    return _each_of(tensors, lambda x: x.reshape(1) if x.dim() == 0 else x)


@rule("atleast_2d", kind="stacked")
def atleast_2d(*tensors: Any) -> Any:
    return _each_of(tensors, lambda x: x if x.dim() > 1 else atleast_1d(x).unsqueeze(0))


@rule("atleast_3d", kind="stacked")
def atleast_3d(*tensors: Any) -> Any:
    return _each_of(tensors, lambda x: x if x.dim() > 2 else atleast_2d(x).unsqueeze(-1))


def _each_of(tensors: tuple, change: Callable[[Any], Any]) -> Any:
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return change(tensors[0])
    given = tensors[0] if len(tensors) == 1 else tensors
    return tuple(change(each) for each in given)


@rule("meshgrid", kind="stacked")
def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Any, ...]:
    given = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    flat = [each.reshape(-1) for each in given]
    swap = indexing == "xy" and len(flat) > 1
    if swap:
        flat[:2] = flat[1::-1]
    sizes = [each.shape[0] for each in flat]
    grids = [
        each.view(*[1] * i, -1, *[1] * (len(flat) - i - 1)).expand(sizes)
        for i, each in enumerate(flat)
    ]
    if swap:
        grids[:2] = grids[1::-1]
    return tuple(grids)


@structural("unbind")
def unbind(input: Dual, dim: int = 0) -> tuple[Dual, ...]:
    return tuple(map(Dual, input.stack.unbind(shift(dim, input.stack))))


@rule("__iter__", kind="stacked")
def iterate(input: Dual) -> Any:
    return iter(unbind(input))


@structural("narrow")
def narrow(input: Dual, dim: int, start: Any, length: int) -> Dual:
    return Dual(input.stack.narrow(shift(dim, input.stack), start, length))


@structural("select")
def select(input: Dual, dim: int, index: int) -> Dual:
    return Dual(input.stack.select(shift(dim, input.stack), index))


@structural("diagonal")
def diagonal(input: Dual, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Dual:
    return Dual(input.stack.diagonal(offset, shift(dim1, input.stack), shift(dim2, input.stack)))


@structural("unfold", owners=(torch.Tensor,))
def unfold(input: Dual, dimension: int, size: int, step: int) -> Dual:
    return Dual(input.stack.unfold(shift(dimension, input.stack), size, step))


def _lift_all(tensors: Sequence[Any]) -> list[Tensor]:
    """The stacks of Duals and, with a zero tangent, of plain tensors; integers as floats."""
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    stacks = []
    for each in tensors:
        if type(each) is Dual:
            stacks.append(each.stack)
        else:
            value = each if each.is_floating_point() or each.is_complex() else each.to(dtype)
            stacks.append(torch.stack((value, torch.zeros_like(value))))
    return stacks


@rule("cat", "concat", "concatenate", kind="stacked")
def cat(tensors: Sequence[Any], dim: int = 0) -> Dual:
    # torch skips empty one-dimensional tensors whatever the others' rank.
    stacks = _lift_all([each for each in tensors if tuple(each.shape) != (0,)] or tensors)
    if any(map(_is_in_other_format, stacks)):
        return _by_halves(torch.cat, stacks, dim)
    return Dual(torch.cat(stacks, shift(dim, stacks[0])))


@rule("stack", kind="stacked")
def stack(tensors: Sequence[Any], dim: int = 0) -> Dual:
    stacks = _lift_all(tensors)
    if any(map(_is_in_other_format, stacks)):
        return _by_halves(torch.stack, stacks, dim)
    return Dual(torch.stack(stacks, shift(dim, stacks[0], 1)))


def _is_in_other_format(stack: Tensor) -> bool:
    """Whether torch takes a stack, or its halves, for channels last, which it keeps when it joins
    them: halves it joins as eager would."""
    shape, stride = stack.shape, stack.stride()
    return is_channels_last(shape, stride) or is_channels_last(shape[1:], stride[1:])


def _by_halves(join: Callable[..., Tensor], stacks: list[Tensor], dim: int) -> Dual:
    halves = [join([stack[half] for stack in stacks], dim) for half in (0, 1)]
    return Dual(stack_pair(*halves))


@rule("contiguous", kind="stacked")
def contiguous(input: Dual, memory_format: torch.memory_format = torch.contiguous_format) -> Dual:
    if in_eager(input.stack).is_contiguous(memory_format=memory_format):
        return input
    return _in_format(input, memory_format)


def _in_format(input: Dual, memory_format: torch.memory_format) -> Dual:
    """A copy in a memory format."""
    if memory_format is torch.preserve_format:
        return Dual(input.stack.clone())
    if memory_format is torch.contiguous_format:
        return Dual(input.stack.clone(memory_format=memory_format))
    primal, tangent = (half.clone(memory_format=memory_format) for half in input.stack)
    return Dual(stack_pair(primal, tangent))


@rule("clone", kind="stacked")
def clone(input: Dual, *, memory_format: torch.memory_format = torch.preserve_format) -> Dual:
    return _in_format(input, memory_format)


def _cast(method: Callable[..., Tensor], input: Dual, args: tuple, kwargs: dict) -> Any:
    """A conversion of dtype, device or memory format."""
    if kwargs.get("memory_format") is None:
        return _converted(input, method(input.stack, *args, **kwargs))
    primal = input.stack[0]
    converted = method(primal, *args, **kwargs)
    if converted is primal:
        return input
    if not (converted.is_floating_point() or converted.is_complex()):
        return converted
    return Dual(stack_pair(converted, method(input.stack[1], *args, **kwargs)))


def _converted(input: Dual, stack: Tensor) -> Any:
    """`stack` after a conversion of the input's."""
    if stack is input.stack:
        return input
    # A conversion to integers asks about values; floats keep their tangent.
    return Dual(stack) if stack.is_floating_point() or stack.is_complex() else stack[0]


@rule("to", kind="stacked")
def to(input: Any, *args: Any, **kwargs: Any) -> Any:
    args = tuple(primal_of(arg) for arg in args)
    kwargs = {key: primal_of(value) for key, value in kwargs.items()}
    if type(input) is not Dual:
        return input.to(*args, **kwargs)
    return _cast(torch.Tensor.to, input, args, kwargs)


@rule("type_as", kind="stacked")
def type_as(input: Any, other: Tensor) -> Any:
    if type(input) is not Dual:
        return input.type_as(primal_of(other))
    return _converted(input, input.stack.type_as(primal_of(other)))


@rule("type", kind="stacked")
def type_(input: Dual, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None:
        return input.stack.type()
    return _converted(input, input.stack.type(dtype, **kwargs))


def _register_casts() -> None:
    for name in ("float", "half", "bfloat16", "double", "cpu", "cuda"):
        method = getattr(torch.Tensor, name)

        def handler(input: Dual, *args: Any, _method: Any = method, **kwargs: Any) -> Any:
            return _cast(_method, input, args, kwargs)

        for target in objects_named(name):
            RULES[target] = Rule(name, "stacked", handler)


_register_casts()


# -- linear ops without a cheaper form: each half by itself


def _each(func: Callable[..., Any]) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        sources = {id(arg): arg for arg in (*args, *kwargs.values()) if type(arg) is Dual}
        if len(sources) != 1:
            return jvp(func, getattr(func, "__name__", str(func)), args, kwargs)

        def half(i: int) -> Tensor:
            return func(
                *(arg.stack[i] if type(arg) is Dual else arg for arg in args),
                **{k: a.stack[i] if type(a) is Dual else a for k, a in kwargs.items()},
            )

        return Dual(stack_pair(half(0), half(1)))

    return handler


def _register_linear() -> None:
    names = (
        "gather index_select take take_along_dim masked_select cumsum flip fliplr flipud roll "
        "rot90 tile tril triu diag diag_embed trace pixel_shuffle pixel_unshuffle"
    )
    for name in names.split():
        for target in objects_named(name):
            RULES[target] = Rule(name, "stacked", _each(target))


_register_linear()


@rule("pad", kind="stacked")
def pad(input: Dual, pad: Any, mode: str = "constant", value: float | None = None) -> Dual:
    primal, tangent = input.stack.unbind(0)
    if mode == "constant":
        return Dual.join(F.pad(primal, pad, mode, value), F.pad(tangent, pad, mode, 0.0))
    return Dual.join(F.pad(primal, pad, mode), F.pad(tangent, pad, mode))
