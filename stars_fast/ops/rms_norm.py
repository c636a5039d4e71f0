"""RMSNorm, dual forward and its backward.

With r = rsqrt(mean(x^2) + eps), n = r x, c = mean(n * r x_dot):
    y = w n        n_dot = r x_dot - n c        y_dot = w n_dot
With a = w y_bar, b = w y_dot_bar, s = mean(b n), s_dot = mean(a n + b n_dot):
    x_dot_bar = r (b - n s)
    x_bar     = r (a - n_dot s - n s_dot) - r c (b - n s)
    w_bar     = sum(y_bar n + y_dot_bar n_dot)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stars_fast.ops.precision import widen


def normalise(x: Tensor, x_dot: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """n, n_dot [..., D] and the row statistics r, c [..., 1]."""
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    n = x * r
    n_dot = x_dot * r
    c = (n * n_dot).mean(-1, keepdim=True)
    n_dot = torch.addcmul(n_dot, n, c, value=-1)
    return n, n_dot, r, c


def normalise_backward(
    a: Tensor, b: Tensor, n: Tensor, n_dot: Tensor, r: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """x_bar, x_dot_bar from the cotangents a of n and b of n_dot."""
    s = (b * n).mean(-1, keepdim=True)
    s_dot = (a * n).mean(-1, keepdim=True) + (b * n_dot).mean(-1, keepdim=True)
    x_dot_bar = torch.addcmul(b, n, s, value=-1) * r
    x_bar = torch.addcmul(torch.addcmul(a, n_dot, s, value=-1), n, s_dot, value=-1) * r
    return torch.addcmul(x_bar, x_dot_bar, c, value=-1), x_dot_bar


def weight_gradient(g: Tensor, n: Tensor, n_dot: Tensor) -> Tensor:
    """w_bar [D] from the cotangents g [2, ..., D]."""
    product = g[0] * n + g[1] * n_dot
    return product.flatten(0, -2).sum(0) if product.dim() > 1 else product


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
    ) -> Tensor:
        wide = widen(x)
        n, n_dot, _, _ = normalise(wide[0], wide[1], eps)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        if weight is not None:
            wide_weight = widen(weight)
            n, n_dot = n * wide_weight, n_dot * wide_weight
        return torch.stack((n, n_dot)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, g = widen(x), widen(g)
        n, n_dot, r, c = normalise(wide[0], wide[1], ctx.eps)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            a, b = (g[0], g[1]) if weight is None else (g * widen(weight)).unbind(0)
            x_grad = torch.stack(normalise_backward(a, b, n, n_dot, r, c)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = weight_gradient(g, n, n_dot).to(weight.dtype)
        return x_grad, weight_grad, None, None


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Dual RMSNorm over the last dimension.

    Args:
        x: [2, ..., D].
        weight: [D] or None.
        eps: added to the mean square.
        dtype: of the result; by default that of `x`.

    Returns:
        [2, ..., D]. Statistics are in fp32 for 16-bit inputs.
    """
    return _RMSNorm.apply(x, weight, eps, dtype or x.dtype)
