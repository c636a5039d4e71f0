"""A linear map of a pair of which the tangent alone is asked for.

    y_dot = x_dot W^T      (the bias moves nothing)

Backward, with b = y_dot_bar: x_dot_bar = b W, x_bar = 0, W_bar = b^T x_dot, bias_bar = 0. Half of
the work of the map of a pair, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def tangent_linear(stack: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The tangent of `F.linear(x, weight, bias)`.

    Args:
        stack: [2, ..., K], x and its tangent.
        weight: [N, K], of stack's dtype.
        bias: [N]; its gradient is 0.

    Returns:
        [..., N].
    """
    return _TangentLinear.apply(stack, weight, bias)


class _TangentLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(stack, weight, bias)
        return F.linear(stack[1], weight)

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        stack, weight, bias = ctx.saved_tensors
        rows = b.reshape(-1, b.shape[-1])
        stack_bar = weight_bar = None
        if ctx.needs_input_grad[0] and torch.is_grad_enabled():  # a gradient of this gradient
            moved = b @ weight
            stack_bar = torch.stack((torch.zeros_like(moved), moved))
        elif ctx.needs_input_grad[0]:
            stack_bar = torch.empty_like(stack, memory_format=torch.contiguous_format)
            stack_bar[0].zero_()
            torch.mm(rows, weight, out=stack_bar[1].view(-1, weight.shape[1]))
        if ctx.needs_input_grad[1]:
            weight_bar = rows.mT @ stack[1].reshape(-1, weight.shape[1])
        return stack_bar, weight_bar, torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
