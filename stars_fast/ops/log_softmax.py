"""log_softmax over the last dimension, dual forward and its backward.

With p = softmax(x), mu = sum(p x_dot):
    y = log p             y_dot = x_dot - mu
With A = sum(y_bar), B = sum(y_dot_bar):
    x_dot_bar = y_dot_bar - p B
    x_bar     = y_bar - p (A + B y_dot)
The greatest x is taken off first: an offset of x costs nothing. The result is saved, as in eager;
in 16 bits x, since a rounded logarithm is no p.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.arguments import check_stack
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.precision import in_dtype, widen


def _tangent(p: Tensor, x_dot: Tensor) -> Tensor:
    return x_dot - (p * x_dot).sum(-1, keepdim=True)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = widen(x)
        y = _of(wide)
        ctx.save_for_backward(y if wide is x else x)
        ctx.from_result = wide is x
        return y.to(x.dtype)

    @staticmethod
    @first_derivative("log_softmax")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        y = saved if ctx.from_result else _of(widen(saved))
        g, p = widen(grad), y[0].exp()
        sums = g.sum(-1, keepdim=True)
        weight = torch.addcmul(sums[0], sums[1], y[1])
        return torch.stack((g[0] - p * weight, g[1] - p * sums[1])).to(saved.dtype)


def _of(x: Tensor) -> Tensor:
    y = torch.log_softmax(x[0], -1)
    return torch.stack((y, _tangent(y.exp(), x[1])))


def log_softmax(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of the softmax over the last dimension.

    Args:
        x: [2, ..., N], a stack of primal and tangent.
        dtype: of the result; by default that of `x`.

    Returns:
        x's shape. 16-bit inputs are computed in fp32.

    Raises:
        TypeError, ValueError: `x` is not floating point, or no stack.
    """
    check_stack("log_softmax", "x", x)
    return in_dtype(_LogSoftmax.apply, x, dtype)
