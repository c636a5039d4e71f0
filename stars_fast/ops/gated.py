"""Gated activation (SwiGLU with f = silu, GeGLU with f = gelu), dual forward and its backward.

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
from torch.autograd.function import once_differentiable

from stars_fast.ops.pointwise import DERIVATIVES
from stars_fast.ops.precision import widen


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(g, u)
        ctx.name = name
        (x, x_dot), (u0, u_dot) = widen(g).unbind(0), widen(u).unbind(0)
        f, f1, _ = DERIVATIVES[name](x)
        y_dot = torch.addcmul(f1 * x_dot * u0, f, u_dot)
        return torch.stack((f * u0, y_dot)).to(torch.promote_types(g.dtype, u.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        g, u = ctx.saved_tensors
        (x, x_dot), (u0, u_dot) = widen(g).unbind(0), widen(u).unbind(0)
        a, b = widen(grad).unbind(0)
        f, f1, f2 = DERIVATIVES[ctx.name](x)
        slope = f1 * u0
        g_bar = torch.addcmul(a * slope, b, torch.addcmul(f1 * u_dot, f2, x_dot * u0))
        u_bar = torch.addcmul(a * f, b, f1 * x_dot)
        g_grad = torch.stack((g_bar, b * slope)).to(g.dtype)
        u_grad = torch.stack((u_bar, b * f)).to(u.dtype)
        return g_grad, u_grad, None


def gated(g: Tensor, u: Tensor, activation: str = "silu") -> Tensor:
    """Dual `f(g) * u`.

    Args:
        g: [2, ..., D], goes through the activation.
        u: [2, ..., D], same shape.
        activation: a key of `pointwise.DERIVATIVES`.

    Returns:
        [2, ..., D].

    Raises:
        ValueError: shapes differ, or the activation is unknown.
    """
    if g.shape != u.shape:
        raise ValueError(f"gated: u must have g's shape {list(g.shape)}, got {list(u.shape)}")
    if activation not in DERIVATIVES:
        raise ValueError(
            f"gated: activation must be one of {sorted(DERIVATIVES)}, got {activation!r}"
        )
    return _Gated.apply(g, u, activation)
