"""Gated activation (SwiGLU with f = silu, GeGLU with f = gelu, a product with f = identity), dual
forward and its backward.

    y = f(g) u                    y_dot = f'(g) g_dot u + f(g) u_dot
    g_dot_bar = y_dot_bar f' u    u_dot_bar = y_dot_bar f
    g_bar = y_bar f' u + y_dot_bar (f'' g_dot u + f' u_dot)
    u_bar = y_bar f + y_dot_bar f' g_dot

Only g and u are saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.arguments import check_stack
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.library import implementation, plain
from stars_fast.ops.pointwise import DERIVATIVES
from stars_fast.ops.precision import widen
from stars_fast.ops.selective import remember


@plain("gated")
def _gated(g: Tensor, u: Tensor, name: str, dual: bool) -> Tensor:
    wide_g, wide_u = widen(g).contiguous(), widen(u).contiguous()
    if not dual:
        return (DERIVATIVES[name](wide_g)[0] * wide_u).to(g.dtype)
    (x, x_dot), (u0, u_dot) = wide_g.unbind(0), wide_u.unbind(0)
    f, f1, _ = DERIVATIVES[name](x)
    return torch.stack((f * u0, torch.addcmul(f1 * x_dot * u0, f, u_dot))).to(g.dtype)


@plain("gated_backward")
def _gated_backward(
    grad: Tensor, g: Tensor, u: Tensor, name: str, dual: bool
) -> tuple[Tensor, Tensor]:
    wide_g, wide_u, bar = (widen(x).contiguous() for x in (g, u, grad))
    if not dual:
        f, f1, _ = DERIVATIVES[name](wide_g)
        return (bar * f1 * wide_u).to(g.dtype), (bar * f).to(u.dtype)
    (x, x_dot), (u0, u_dot), (a, b) = wide_g.unbind(0), wide_u.unbind(0), bar.unbind(0)
    f, f1, f2 = DERIVATIVES[name](x)
    slope = f1 * u0
    g_bar = torch.addcmul(a * slope, b, torch.addcmul(f1 * u_dot, f2, x_dot * u0))
    u_bar = torch.addcmul(a * f, b, f1 * x_dot)
    return torch.stack((g_bar, b * slope)).to(g.dtype), torch.stack((u_bar, b * f)).to(u.dtype)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, name: str, dual: bool) -> Tensor:
        ctx.save_for_backward(g, u)
        ctx.options = name, dual
        y = implementation("gated", g, name)(g, u, name, dual)
        return remember(y, "gated", g, u, name, dual, function=name)

    @staticmethod
    @first_derivative("gated")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        g, u = ctx.saved_tensors
        backward = implementation("gated_backward", g, ctx.options[0])
        g_bar, u_bar = backward(grad, g, u, *ctx.options)
        return g_bar, u_bar, None, None


def gated(g: Tensor, u: Tensor, activation: str = "silu", *, dual: bool = True) -> Tensor:
    """`f(g) * u`.

    Args:
        g: [2, ..., D], or [..., D] with `dual=False`; goes through the activation.
        u: the same shape and dtype.
        activation: a key of `pointwise.DERIVATIVES`.
        dual: whether `g` and `u` are stacks of primal and tangent.

    Returns:
        g's shape and dtype. 16-bit inputs are computed in fp32.

    Raises:
        TypeError: `g` is not floating point.
        ValueError: shapes or dtypes differ, the activation is unknown, or `g` no stack.
    """
    if g.shape != u.shape or g.dtype != u.dtype:
        raise ValueError(
            f"gated: u: expected g's shape {list(g.shape)} and dtype {g.dtype}, "
            f"got {list(u.shape)}, {u.dtype}"
        )
    check_stack("gated", "g", g, dual)
    if activation not in DERIVATIVES:
        raise ValueError(
            f"gated: activation: expected one of {sorted(DERIVATIVES)}, got {activation!r}"
        )
    return _Gated.apply(g, u, activation, dual)
