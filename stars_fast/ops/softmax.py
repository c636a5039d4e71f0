"""Softmax over the last dimension, dual forward and its backward.

With mu = sum(y x_dot):
    y = softmax(x)        y_dot = y (x_dot - mu)
With D = sum(y y_dot_bar), D_dot = sum(y y_bar + y_dot y_dot_bar), E = y_dot_bar - D:
    x_dot_bar = y E
    x_bar     = y_dot E + y (y_bar - D_dot)
Rows of -inf give NaN, as torch.softmax does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.arguments import check_stack
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.library import implementation, plain
from stars_fast.ops.precision import in_dtype, widen


@plain("softmax")
def _softmax(x: Tensor, dual: bool) -> Tensor:
    wide = widen(x).contiguous()
    if not dual:
        return torch.softmax(wide, -1).to(x.dtype)
    y = torch.softmax(wide[0], -1)
    mu = (y * wide[1]).sum(-1, keepdim=True)
    return torch.stack((y, (wide[1] - mu) * y)).to(x.dtype)


def backward_in_place(a: Tensor, b: Tensor, y: Tensor, y_dot: Tensor) -> None:
    """The cotangents a of y and b of y_dot become those of x and x_dot."""
    d_dot = (y * a).sum(-1, keepdim=True) + (y_dot * b).sum(-1, keepdim=True)
    b.sub_((y * b).sum(-1, keepdim=True))
    a.sub_(d_dot).mul_(y).addcmul_(y_dot, b)
    b.mul_(y)


@plain("softmax_backward")
def _softmax_backward(grad: Tensor, y: Tensor, dual: bool) -> Tensor:
    wide, g = widen(y).contiguous(), widen(grad).contiguous()
    if not dual:
        return ((g - (g * wide).sum(-1, keepdim=True)) * wide).to(y.dtype)
    g = g.clone()
    backward_in_place(g[0], g[1], wide[0], wide[1])
    return g.to(y.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dual: bool) -> Tensor:
        y = implementation("softmax", x)(x, dual)
        ctx.save_for_backward(y)
        ctx.dual = dual
        return y

    @staticmethod
    @first_derivative("softmax")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return implementation("softmax_backward", y)(grad, y, ctx.dual), None


def softmax(x: Tensor, dtype: torch.dtype | None = None, *, dual: bool = True) -> Tensor:
    """Softmax over the last dimension.

    Args:
        x: [2, ..., N], or [..., N] with `dual=False`.
        dtype: of the result; by default that of `x`.
        dual: whether `x` is a stack of primal and tangent.

    Returns:
        x's shape. 16-bit inputs are computed in fp32.

    Raises:
        TypeError, ValueError: `x` is not floating point, or no stack.
    """
    check_stack("softmax", "x", x, dual)
    return in_dtype(lambda x: _Softmax.apply(x, dual), x, dtype)
