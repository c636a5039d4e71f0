"""Softmax over the last dimension, dual forward and its backward.

With mu = sum(y x_dot):
    y = softmax(x)        y_dot = y (x_dot - mu)
With D = sum(y y_dot_bar), D_dot = sum(y y_bar + y_dot y_dot_bar), E = y_dot_bar - D:
    x_dot_bar = y E
    x_bar     = y_dot E + y (y_bar - D_dot)
`softmax_forward` may give rows of -inf the weight 0, as attention does; torch.softmax gives NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stars_fast.ops.precision import widen


def softmax_forward(x: Tensor, x_dot: Tensor, empty_rows: bool = False) -> tuple[Tensor, Tensor]:
    """y and y_dot. `x_dot` is overwritten with y_dot. With `empty_rows` rows of -inf give 0."""
    y = torch.softmax(x, -1)
    if empty_rows and x.numel():
        y = y.masked_fill_(x.amax(-1, keepdim=True).eq(-torch.inf), 0.0)
    mu = (y * x_dot).sum(-1, keepdim=True)
    return y, x_dot.sub_(mu).mul_(y)


def softmax_backward(a: Tensor, b: Tensor, y: Tensor, y_dot: Tensor) -> tuple[Tensor, Tensor]:
    """x_bar and x_dot_bar from the cotangents a of y and b of y_dot. Both are overwritten."""
    d_dot = (y * a).sum(-1, keepdim=True) + (y_dot * b).sum(-1, keepdim=True)
    e = b.sub_((y * b).sum(-1, keepdim=True))
    x_bar = a.sub_(d_dot).mul_(y).addcmul_(y_dot, e)
    return x_bar, e.mul_(y)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        wide = widen(x).to(torch.promote_types(x.dtype, dtype))
        ctx.in_dtype = x.dtype
        out = torch.stack(softmax_forward(wide[0], wide[1].clone())).to(dtype)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        out, g = widen(out), widen(g)
        grads = softmax_backward(g[0].clone(), g[1].clone(), out[0], out[1])
        return torch.stack(grads).to(ctx.in_dtype), None


def softmax(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Dual softmax over the last dimension: x [2, ..., N] -> [2, ..., N] in `dtype` (or x's)."""
    return _Softmax.apply(x, dtype or x.dtype)
