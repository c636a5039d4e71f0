"""Bias of a linear map: it shifts the primal and leaves the tangent alone.

y = x + b        y_dot = x_dot
x_bar = y_bar    x_dot_bar = y_dot_bar    b_bar = sum(y_bar)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype, ctx.lead = bias.dtype, x.dim() - 1 - bias.dim()
        # Never into x: selective checkpointing may hold the product.
        shift = torch.stack((bias, torch.zeros_like(bias))).to(x.dtype)
        return x + shift.view(2, *[1] * ctx.lead, *bias.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:
        g_bias = None
        if ctx.needs_input_grad[1]:
            g_bias = g[0].flatten(0, ctx.lead - 1).sum(0) if ctx.lead else g[0]
        return g, g_bias if g_bias is None else g_bias.to(ctx.dtype)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x [2, ..., D], bias [D] -> [2, ..., D], x's dtype."""
    return _AddBias.apply(x, bias)
