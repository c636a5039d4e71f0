"""Elementwise functions whose derivatives torch rounds badly, in plain PyTorch.

Formulas as in `pointwise.py`, which has those that are compiled. Here it is f' and f'' that need
care: differences of equal terms near 0, near the end of the domain or far out become series,
products of exact factors or continued fractions.
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
from stars_fast.ops.pointwise import Triple
from stars_fast.ops.precision import in_dtype, widen


def _mish(x: Tensor) -> Triple:
    """x tanh(w), w = softplus(x)."""
    s = torch.sigmoid(x)
    t = torch.tanh(F.softplus(x))
    decay = torch.exp(-2 * F.softplus(x))
    sech2 = 4 * decay / (1 + decay).square()
    t1 = sech2 * s
    t2 = sech2 * s * ((1 - s) - 2 * t * s)
    return F.mish(x), t + x * t1, 2 * t1 + x * t2


def _hardsigmoid(x: Tensor) -> Triple:
    inside = (x > -3) & (x < 3)
    return F.hardsigmoid(x), inside.to(x.dtype) / 6, torch.zeros_like(x)


def _polynomial(z: Tensor, coefficients: list[float]) -> Tensor:
    """c_0 + c_1 z + c_2 z^2 + ..."""
    result = torch.full_like(z, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * z + c
    return result


_TERMS = range(1, 12)  # for |z| < 1 the next is below 1e-20


def _sinc(x: Tensor) -> Triple:
    """g(z) = sin(z) / z at z = pi x: g' = (cos z - g) / z, g'' = -g - 2 g' / z."""
    f, z = torch.sinc(x), math.pi * x
    near = z.abs() < 1
    safe = torch.where(near, 1.0, z)
    g1 = (torch.cos(safe) - f) / safe
    g2 = -f - 2 * g1 / safe
    signs = [(-1.0) ** k / math.factorial(2 * k + 1) for k in _TERMS]
    first = [2 * k * c for k, c in zip(_TERMS, signs, strict=True)]
    second = [2 * k * (2 * k - 1) * c for k, c in zip(_TERMS, signs, strict=True)]
    square = z * z
    g1 = torch.where(near, z * _polynomial(square, first), g1)
    g2 = torch.where(near, _polynomial(square, second), g2)
    return f, math.pi * g1, math.pi**2 * g2


def _bessel_ratios(x: Tensor) -> tuple[Tensor, Tensor]:
    """I_1(x) / x and I_2(x) / x for |x| < 1."""
    z = 0.25 * x * x
    one = [1 / (math.factorial(k) * math.factorial(k + 1)) for k in range(10)]
    two = [1 / (math.factorial(k) * math.factorial(k + 2)) for k in range(10)]
    return 0.5 * _polynomial(z, one), 0.25 * x * _polynomial(z, two)


def _i1_scaled(x: Tensor, i0: Tensor, i1: Tensor) -> tuple[Tensor, Tensor]:
    """I_1' = I_0 - I_1 / x and I_1'' = I_1 - I_2 / x, I_2 = I_0 - 2 I_1 / x; the factor that i0 and
    i1 carry is that of the results."""
    near = x.abs() < 1
    safe = torch.where(near, 1.0, x)
    small = torch.where(near, x, 0.0)
    ratio, ratio2 = _bessel_ratios(small)
    # Near 0, where I_0 = 1 + ..., the factor is i0 over I_0.
    factor = i0 / torch.i0(small)
    over_x = torch.where(near, ratio * factor, i1 / safe)
    two_over_x = torch.where(near, ratio2 * factor, (i0 - 2 * i1 / safe) / safe)
    return i0 - over_x, i1 - two_over_x


def _i1(x: Tensor) -> Triple:
    f = torch.special.i1(x)
    return (f, *_i1_scaled(x, torch.i0(x), f))


def _i1e(x: Tensor) -> Triple:
    f, sign = torch.special.i1e(x), torch.sign(x)
    first, second = _i1_scaled(x, torch.special.i0e(x), f)
    return f, first - sign * f, second - 2 * sign * first + f


def _asin(x: Tensor) -> Triple:
    first = torch.rsqrt((1 - x) * (1 + x))
    return torch.asin(x), first, x * first**3


def _acos(x: Tensor) -> Triple:
    _, first, second = _asin(x)
    return torch.acos(x), -first, -second


def _acosh(x: Tensor) -> Triple:
    first = torch.rsqrt((x - 1) * (x + 1))
    return torch.acosh(x), first, -x * first**3


def _atanh(x: Tensor) -> Triple:
    first = 1 / ((1 - x) * (1 + x))
    return torch.atanh(x), first, 2 * x * first.square()


def _log_ndtr(x: Tensor) -> Triple:
    """f' = h = density / Phi, f'' = -h (h + x). Far to the left h + x is the continued fraction
    1 / (t + 2 / (t + 3 / (t + ...))) at t = -x."""
    left = x < 0
    behind, ahead = torch.where(left, x, 0.0), torch.where(left, 0.0, x)
    mills = math.sqrt(2 / math.pi) / torch.special.erfcx(behind * -math.sqrt(0.5))
    density = torch.exp(-0.5 * ahead * ahead) / math.sqrt(2 * math.pi)
    h = torch.where(left, mills, density / torch.special.ndtr(ahead))
    far = x < -4
    t = torch.where(far, -x, 4.0)
    rest = t
    for k in range(60, 1, -1):
        rest = t + k / rest
    return torch.special.log_ndtr(x), h, -h * torch.where(far, 1 / rest, h + x)


FUNCTIONS: dict[str, Callable[[Tensor], Triple]] = {
    "mish": _mish,
    "hardsigmoid": _hardsigmoid,
    "sinc": _sinc,
    "i1": _i1,
    "i1e": _i1e,
    "asin": _asin,
    "acos": _acos,
    "acosh": _acosh,
    "atanh": _atanh,
    "log_ndtr": _log_ndtr,
}


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        wide = widen(x)
        f, f1, _ = FUNCTIONS[name](wide[0])
        return torch.stack((f, f1 * wide[1])).to(x.dtype)

    @staticmethod
    @first_derivative("elementwise")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        wide, g = widen(x), widen(grad)
        _, f1, f2 = FUNCTIONS[ctx.name](wide[0])
        x_bar = torch.addcmul(f1 * g[0], f2, wide[1] * g[1])
        return torch.stack((x_bar, f1 * g[1])).to(x.dtype), None


def elementwise(x: Tensor, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Elementwise function.

    Args:
        x: [2, ...], a stack of primal and tangent.
        name: a key of `FUNCTIONS`.
        dtype: of the result; by default that of `x`.

    Returns:
        x's shape. 16-bit inputs are computed in fp32.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: `name` is unknown, or `x` no stack.
    """
    if name not in FUNCTIONS:
        raise ValueError(f"elementwise: name: expected one of {sorted(FUNCTIONS)}, got {name!r}")
    check_stack("elementwise", "x", x)
    return in_dtype(lambda x: _Elementwise.apply(x, name), x, dtype)
