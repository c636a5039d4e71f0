"""RMSNorms and gated activations of any library: known by the ops they call, run as one.

    RMSNorm   x * rsqrt(mean(x * x) + eps), also as x / sqrt(...); then times a weight, or before it
    gate      f(g) * u, with f silu, gelu or relu
    gelu      the tanh form, written out from powers (GPT-2)
    silu      x * sigmoid(x)

Casts to fp32, and back to the input's dtype, belong to a norm. `steps.py` says how a formula is
followed from op to op; anything else between its ops makes them run as written.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stars_fast import ops
from stars_fast.dual.recognition.steps import (
    check_held,
    complete,
    device_of,
    dtype_of,
    is_narrowed,
    is_open,
    is_plain,
    recorder,
    shape_of,
    step_of,
    wait,
)
from stars_fast.dual.tensor import Dual

_WIDE = (torch.float32, torch.float64)


def _keeps_dtype(x: Dual) -> bool:
    """Whether torch computes powers and roots of x in x's dtype."""
    return not is_narrowed(dtype_of(x), device_of(x))


def _pair(args: tuple, kwargs: dict) -> tuple[Any, Any]:
    """The two operands of a call without options; two None for another call."""
    return (args[0], args[1]) if len(args) == 2 and not kwargs else (None, None)


def _number(x: Any) -> float | None:
    return float(x) if type(x) in (int, float) else None


def is_constant(number: float | None, constant: float) -> bool:
    """Whether a number of the block's is a constant of a formula: to the last digit."""
    return number == constant


# -- casts


def _target(func: Any, args: tuple, kwargs: dict) -> torch.dtype | None:
    """The dtype that a cast asks for, where it asks for nothing else."""
    name = func.__name__
    if name == "float":
        return torch.float32 if len(args) == 1 and not kwargs else None
    if name == "type_as":
        other = args[1] if len(args) == 2 and not kwargs else None
        if type(other) is not Dual and not (isinstance(other, Tensor) and is_plain(other)):
            return None
        if _device(other) != _device(args[0]):
            return None
        return dtype_of(other) if type(other) is Dual else other.dtype
    given = args[1] if len(args) == 2 and not kwargs else kwargs.get("dtype")
    if isinstance(given, torch.dtype) and len(args) + len(kwargs) == 2:
        return given
    return None


def _device(x: Any) -> torch.device:
    return device_of(x) if type(x) is Dual else x.device


@recorder("to", "float", "type_as")
def follow_cast(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    x = args[0]
    dtype = _target(func, args, kwargs) if type(x) is Dual else None
    if dtype is None or not dtype.is_floating_point:
        return None
    if dtype == dtype_of(x):
        return x  # as torch does
    norm = step_of(x, "norm")
    if norm is not None:
        if dtype not in (*_WIDE, dtype_of(norm.of)):
            return None
        eps, weight = norm.value
        if weight is not None:
            check_held(norm)
            return _run_norm(norm.of, eps, weight, dtype)
        return _norm(norm.of, eps, None, dtype)
    if x.step is None and is_open(x) and dtype in _WIDE:
        return wait("cast", x, (func, args, kwargs), dtype=dtype)
    return None


# -- RMSNorm


def _root(x: Dual) -> Dual:
    """x before a cast."""
    step = step_of(x, "cast")
    return x if step is None else step.of


def _square(x: Any, called: tuple[Any, tuple, dict]) -> Dual | None:
    if not is_open(x) or not shape_of(x) or not _keeps_dtype(x):
        return None
    if dtype_of(x) == torch.float16:
        return None  # squares that overflow are what the block computes
    return wait("square", x, called)


@recorder("square")
def follow_square(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    return _square(args[0], (func, args, kwargs)) if len(args) == 1 and not kwargs else None


@recorder("pow", "__pow__")
def follow_power(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    x, exponent = _pair(args, kwargs)
    n = _number(exponent)
    if is_constant(n, 2):
        return _square(x, (func, args, kwargs))
    if is_constant(n, 3) and is_open(x) and _keeps_dtype(x):
        return wait("cube", x, (func, args, kwargs))
    inner = step_of(x, "mean + eps") if is_constant(n, -0.5) else None
    return None if inner is None else _inverse_root(x, (func, args, kwargs))


@recorder("mean")
def follow_mean(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    squares = step_of(args[0], "square")
    if squares is None or len(args) > 3:
        return None
    given = dict(zip(("dim", "keepdim"), args[1:], strict=False), **kwargs)
    dim = given.pop("dim", None)
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    last = type(dim) is int and dim in (-1, len(squares.shape) - 1)
    if not last or given != {"keepdim": True}:
        return None
    shape = torch.Size((*squares.shape[:-1], 1))
    return wait("mean", args[0], (func, args, kwargs), value=squares.of, shape=shape)


@recorder("add", "__add__", "__radd__")
def follow_sum(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    a, b = _pair(args, kwargs)
    if type(a) is not Dual:
        a, b = b, a
    called = func, args, kwargs
    number = _number(b)
    if number is None:
        cube = step_of(b, "c x^3")
        if cube is None or a is not cube.value:
            return None
        return wait("x + c x^3", b, called, value=a)
    if step := step_of(a, "mean"):
        return wait("mean + eps", a, called, value=(step.value, number)) if number > 0 else None
    if step := step_of(a, "tanh"):
        return wait("1 + tanh", a, called, value=step.value) if is_constant(number, 1) else None
    return None


@recorder("rsqrt")
def follow_inverse_root(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    if len(args) != 1 or kwargs or step_of(args[0], "mean + eps") is None:
        return None
    return _inverse_root(args[0], (func, args, kwargs))


def _inverse_root(x: Dual, called: tuple[Any, tuple, dict]) -> Dual:
    return wait("rsqrt", x, called, value=x.step.value)


@recorder("sqrt")
def follow_root(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    step = step_of(args[0], "mean + eps") if len(args) == 1 and not kwargs else None
    return None if step is None else wait("sqrt", args[0], (func, args, kwargs), value=step.value)


@recorder("reciprocal")
def follow_reciprocal(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    step = step_of(args[0], "sqrt") if len(args) == 1 and not kwargs else None
    return None if step is None else wait("rsqrt", args[0], (func, args, kwargs), value=step.value)


@recorder("div", "divide", "true_divide", "__truediv__", "__div__")
def follow_quotient(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    x, below = _pair(args, kwargs)
    step = step_of(below, "sqrt")
    return None if step is None else _normalise(x, *step.value)


def _normalise(x: Any, squared: Dual, eps: float) -> Dual | None:
    """x times or over the root of the mean square of `squared`."""
    if x is squared:
        return _norm(_root(x), eps, None, dtype_of(x))
    scaled = step_of(x, "scaled")
    if scaled is not None and scaled.of is squared:
        return _weighted(_root(squared), eps, scaled.value, scaled.dtype)
    return None


def _norm(x: Dual, eps: float, weight: Tensor | None, dtype: torch.dtype) -> Dual | None:
    """A norm whose result may still be weighted or cast."""
    if not x.stack.is_contiguous():
        return None  # the result would have another layout than that of the ops
    return wait(
        "norm",
        x,
        lambda: _run_norm(x, eps, weight, dtype),
        value=(eps, weight),
        dtype=dtype,
        uses=weight,
    )


def _weighted(x: Dual, eps: float, weight: Tensor, dtype: torch.dtype) -> Dual | None:
    """A norm times its weight: done, unless its dtype says that a cast back is to come."""
    if not x.stack.is_contiguous():
        return None
    if dtype == x.stack.dtype:
        return _run_norm(x, eps, weight, dtype)
    return _norm(x, eps, weight, dtype)


def _run_norm(x: Dual, eps: float, weight: Tensor | None, dtype: torch.dtype) -> Dual:
    stack = x.stack
    scale = weight
    if scale is not None and scale.dtype not in (stack.dtype, torch.float32):
        scale = scale.to(torch.promote_types(stack.dtype, torch.float32))
    if scale is not None and stack.dtype == torch.float64:
        scale = scale.to(torch.float64)
    return complete("rms_norm", "RMSNorm", ops.rms_norm(stack, scale, eps, dtype), (x, weight))


def _is_weight(x: Dual, weight: Tensor) -> bool:
    shape = shape_of(x)
    if weight.dtype == torch.float64 != dtype_of(x):
        return False  # a norm in fp64 alone keeps its digits
    return bool(shape) and weight.shape[0] == shape[-1]


@recorder("mul", "multiply", "__mul__", "__rmul__")
def follow_product(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    if len(args) != 2 or kwargs:
        return None
    a, b = args
    called = func, args, kwargs
    if type(a) is not Dual:
        a, b = b, a
    if type(b) is Dual:
        if a is b:
            return _square(a, called)
        result = _product_of_pairs(a, b)
        return _product_of_pairs(b, a) if result is None else result
    number = _number(b)
    if number is not None:
        return _multiple(a, number, called)
    if not is_plain(b) or b.dim() != 1:
        return None
    norm = step_of(a, "norm")
    if norm is None:
        return wait("scaled", a, called, value=b, uses=b) if _is_scaling(a, b) else None
    if norm.value[1] is not None or not _is_weight(a, b):
        return None
    check_held(norm)
    return _weighted(norm.of, norm.value[0], b, torch.promote_types(norm.dtype, b.dtype))


def _product_of_pairs(x: Dual, other: Dual) -> Dual | None:
    """x * other, where x is a step that a product continues."""
    if x.step is None:
        return None
    if step := step_of(x, "rsqrt"):
        return _normalise(other, *step.value)
    if step := step_of(x, "activation"):
        check_held(step)
        return _gate(step.of, other, step.value)
    if step := step_of(x, "sigmoid"):
        return _activated(other, "silu") if other is step.of else None
    if step := step_of(x, "1 + tanh"):
        half = step_of(other, "x / 2")
        return _activated(half.of, "gelu_tanh") if half and half.of is step.value else None
    return None


def _is_scaling(x: Dual, weight: Tensor) -> bool:
    """Whether x * weight may be the beginning of a norm that is weighted first."""
    if not is_open(x) or (x.step is not None and x.step.kind != "cast"):
        return False
    dtype = dtype_of(x)
    return _is_weight(x, weight) and torch.promote_types(weight.dtype, dtype) == dtype


# -- activations


@recorder("silu", "gelu", "relu")
def follow_activation(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    if len(args) != 1 or kwargs.get("inplace") or not is_open(args[0]):
        return None
    name = func.__name__
    if kwargs.get("approximate") == "tanh":
        name = "gelu_tanh"
    elif not set(kwargs) <= {"inplace", "approximate"}:
        return None
    return wait("activation", args[0], (func, args, kwargs), value=name)


@recorder("sigmoid")
def follow_sigmoid(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    if len(args) != 1 or kwargs or not is_open(args[0]) or not _keeps_dtype(args[0]):
        return None
    return wait("sigmoid", args[0], (func, args, kwargs))


@recorder("tanh")
def follow_tanh(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    step = step_of(args[0], "c (x + c x^3)") if len(args) == 1 and not kwargs else None
    return None if step is None else wait("tanh", args[0], (func, args, kwargs), value=step.value)


def _activated(x: Dual, name: str) -> Dual | None:
    """An activation written out: complete, and perhaps one side of a gate."""
    if not x.stack.is_contiguous():
        return None
    return wait("activation", x, lambda: _run_activation(x, name), value=name)


_ACTIVATIONS = {"silu": "x * sigmoid(x)", "gelu_tanh": "GELU, tanh form"}


def _run_activation(x: Dual, name: str) -> Dual:
    return complete(name, _ACTIVATIONS[name], ops.pointwise(x.stack, name), (x,))


_SLOPE = math.sqrt(2 / math.pi)


def _multiple(x: Dual, number: float, called: tuple[Any, tuple, dict]) -> Dual | None:
    """A part of the tanh GELU: half of x, or one of its two constants."""
    if is_constant(number, 0.5):
        return wait("x / 2", x, called) if is_open(x) else None
    if is_constant(number, 0.044715) and (cube := step_of(x, "cube")):
        return wait("c x^3", x, called, value=cube.of)
    if is_constant(number, _SLOPE) and (inner := step_of(x, "x + c x^3")):
        return wait("c (x + c x^3)", x, called, value=inner.value)
    return None


def _gate(g: Dual, u: Dual, name: str) -> Dual | None:
    if g.stack.shape != u.stack.shape or g.stack.dtype != u.stack.dtype:
        return None
    if not (g.stack.is_contiguous() and u.stack.is_contiguous()):
        return None
    stack = ops.gated(g.stack, u.stack, name)
    return complete(f"gated:{name}", f"{name}(g) * u", stack, (g, u))
