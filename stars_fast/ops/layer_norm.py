"""LayerNorm, dual forward and its backward: RMSNorm of the centred pair.

With x and x_dot centred over the last dimension, n, n_dot, r, c as in `rms_norm`:
    y = w n + b        y_dot = w n_dot
x_bar and x_dot_bar are those of `rms_norm`, centred; w_bar is the same; b_bar = sum(y_bar).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stars_fast.ops.precision import widen
from stars_fast.ops.rms_norm import normalise, normalise_backward, weight_gradient


def _centre(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        wide = _centre(widen(x))
        n, n_dot, _, _ = normalise(wide[0], wide[1], eps)
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.bias_dtype = eps, None if bias is None else bias.dtype
        if weight is not None:
            wide_weight = widen(weight)
            n, n_dot = n * wide_weight, n_dot * wide_weight
        if bias is not None:
            n = n + widen(bias)
        return torch.stack((n, n_dot)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, g = _centre(widen(x)), widen(g)
        n, n_dot, r, c = normalise(wide[0], wide[1], ctx.eps)
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            a, b = (g[0], g[1]) if weight is None else (g * widen(weight)).unbind(0)
            grads = torch.stack(normalise_backward(a, b, n, n_dot, r, c))
            x_grad = _centre(grads).to(x.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = weight_gradient(g, n, n_dot).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            bias_grad = g[0].flatten(0, -2).sum(0) if g.dim() > 2 else g[0]
            bias_grad = bias_grad.to(ctx.bias_dtype)
        return x_grad, weight_grad, bias_grad, None, None


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Dual LayerNorm over the last dimension.

    Args:
        x: [2, ..., D].
        weight: [D] or None.
        bias: [D] or None.
        eps: added to the variance.
        dtype: of the result; by default that of `x`.

    Returns:
        [2, ..., D]. Statistics are in fp32 for 16-bit inputs.
    """
    return _LayerNorm.apply(x, weight, bias, eps, dtype or x.dtype)
