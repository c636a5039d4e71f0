"""Elementwise functions, dual forward and its backward.

    y = f(x)                      y_dot = f'(x) x_dot
    x_dot_bar = f'(x) y_dot_bar   x_bar = f'(x) y_bar + f''(x) x_dot y_dot_bar

`DERIVATIVES[name](x)` gives f, f' and f''. Only x is saved; for the functions that torch
differentiates from their result, only the result (y, y_dot), so that x may be overwritten
afterwards wherever eager allows it. With f' = g(y) and f'' x_dot = k(y) y_dot,

    x_dot_bar = g(y) y_dot_bar    x_bar = g(y) y_bar + k(y) y_dot y_dot_bar

which is the backward above at (y, y_dot) with (g, k) for (f', f''): the functions "relu_result" and
so on of `pointwise_backward`. relu passes cotangents on where y > 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.ops.arguments import check_stack
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.library import implementation, plain
from stars_fast.ops.precision import in_dtype, widen

Triple = tuple[Tensor, Tensor, Tensor]


def _silu(x: Tensor) -> Triple:
    s = torch.sigmoid(x)
    f = x * s
    slope = s * (1 - s)
    return f, s + x * slope, slope * (2 + x * (1 - 2 * s))


def _gelu(x: Tensor) -> Triple:
    density = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    cumulative = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return F.gelu(x), cumulative + x * density, density * (2 - x * x)


def _gelu_tanh(x: Tensor) -> Triple:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(scale * (x + cubic * x**3))
    du = scale * (1 + 3 * cubic * x * x)
    d2u = 6 * scale * cubic * x
    sech2 = 1 - t * t
    first = 0.5 * (1 + t) + 0.5 * x * sech2 * du
    second = sech2 * du + 0.5 * x * sech2 * (d2u - 2 * t * du * du)
    return F.gelu(x, approximate="tanh"), first, second


def _relu(x: Tensor) -> Triple:
    return F.relu(x), (x <= 0).logical_not().to(x.dtype), torch.zeros_like(x)


def _identity(x: Tensor) -> Triple:
    return x, torch.ones_like(x), torch.zeros_like(x)


def _sigmoid(x: Tensor) -> Triple:
    s = torch.sigmoid(x)
    slope = s * (1 - s)
    return s, slope, slope * (1 - 2 * s)


def _tanh(x: Tensor) -> Triple:
    t = torch.tanh(x)
    slope = 1 - t * t
    return t, slope, -2 * t * slope


def _exp(x: Tensor) -> Triple:
    e = torch.exp(x)
    return e, e, e


def _log(x: Tensor) -> Triple:
    inverse = 1 / x
    return torch.log(x), inverse, -inverse * inverse


def _sqrt(x: Tensor) -> Triple:
    y = torch.sqrt(x)
    return y, 0.5 / y, -0.25 / (y * x)


def _rsqrt(x: Tensor) -> Triple:
    y = torch.rsqrt(x)
    return y, -0.5 * y / x, 0.75 * y / (x * x)


def _reciprocal(x: Tensor) -> Triple:
    y = 1 / x
    return y, -y * y, 2 * y**3


def _square(x: Tensor) -> Triple:
    return x * x, 2 * x, torch.full_like(x, 2.0)


def _sin(x: Tensor) -> Triple:
    s = torch.sin(x)
    return s, torch.cos(x), -s


def _cos(x: Tensor) -> Triple:
    c = torch.cos(x)
    return c, -torch.sin(x), -c


def _erf(x: Tensor) -> Triple:
    slope = torch.exp(-x * x) * (2 / math.sqrt(math.pi))
    return torch.erf(x), slope, -2 * x * slope


def _abs(x: Tensor) -> Triple:
    return torch.abs(x), torch.sign(x), torch.zeros_like(x)


DERIVATIVES: dict[str, Callable[[Tensor], Triple]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "identity": _identity,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "exp": _exp,
    "log": _log,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": _reciprocal,
    "square": _square,
    "sin": _sin,
    "cos": _cos,
    "erf": _erf,
    "abs": _abs,
}

# name -> g and k.
_FROM_RESULT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sigmoid": (lambda y: y * (1 - y), lambda y: 1 - 2 * y),
    "tanh": (lambda y: (1 - y) * (1 + y), lambda y: -2 * y),
    "exp": (lambda y: y, torch.ones_like),
    "sqrt": (lambda y: 0.5 / y, lambda y: -0.5 / (y * y)),
    "rsqrt": (lambda y: -0.5 * y**3, lambda y: -1.5 * y * y),
    "reciprocal": (lambda y: -y * y, lambda y: -2 * y),
}


def saved_name(name: str) -> str:
    """The function whose backward answers: `name`, of x, or "`name`_result", of (y, y_dot)."""
    return f"{name}_result" if name in _FROM_RESULT or name == "relu" else name


def _slopes(saved: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """f' and f'' of x, or g and k of y."""
    if name.endswith("_result"):
        g, k = _FROM_RESULT[name.removesuffix("_result")]
        return g(saved), k(saved)
    return DERIVATIVES[name](saved)[1:]


@plain("pointwise")
def _pointwise(x: Tensor, name: str, dual: bool) -> Tensor:
    wide = widen(x).contiguous()
    if not dual:
        return DERIVATIVES[name](wide)[0].to(x.dtype)
    f, f1, _ = DERIVATIVES[name](wide[0])
    return torch.stack((f, f1 * wide[1])).to(x.dtype)


@plain("pointwise_backward")
def _pointwise_backward(grad: Tensor, x: Tensor, name: str, dual: bool) -> Tensor:
    wide, g = widen(x).contiguous(), widen(grad).contiguous()
    if not dual:
        return (_slopes(wide, name)[0] * g).to(x.dtype)
    f1, f2 = _slopes(wide[0], name)
    x_bar = torch.addcmul(f1 * g[0], f2, wide[1] * g[1])
    return torch.stack((x_bar, f1 * g[1])).to(x.dtype)


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dual: bool) -> Tensor:
        y = implementation("pointwise", x, name)(x, name, dual)
        saved = saved_name(name)
        ctx.save_for_backward(x if saved == name else y)
        ctx.options = saved, dual
        return y

    @staticmethod
    @first_derivative("pointwise")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        name, dual = ctx.options
        if name == "relu_result":
            # Chosen, not multiplied: where nothing passes, an infinite cotangent leaves 0.
            return grad.masked_fill((saved[0] if dual else saved) <= 0, 0.0), None, None
        backward = implementation("pointwise_backward", saved, name)
        return backward(grad, saved, name, dual), None, None


def pointwise(
    x: Tensor, name: str, dtype: torch.dtype | None = None, *, dual: bool = True
) -> Tensor:
    """Elementwise function.

    Args:
        x: [2, ...], or [...] with `dual=False`.
        name: a key of `DERIVATIVES`.
        dtype: of the result; by default that of `x`.
        dual: whether `x` is a stack of primal and tangent.

    Returns:
        x's shape. 16-bit inputs are computed in fp32.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: `name` is unknown, or `x` no stack.
    """
    if name not in DERIVATIVES:
        raise ValueError(f"pointwise: name: expected one of {sorted(DERIVATIVES)}, got {name!r}")
    check_stack("pointwise", "x", x, dual)
    return in_dtype(lambda x: _Pointwise.apply(x, name, dual), x, dtype)
