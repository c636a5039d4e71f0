"""Sums of squares by row, for norms per sample and per document.

y = sum(x^2)        x_bar = 2 x y_bar
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.library import implementation, plain
from stars_fast.ops.precision import widen


@plain("row_squares")
def _row_squares(x: Tensor) -> Tensor:
    return widen(x).square().sum(-1)


@plain("row_squares_backward")
def _row_squares_backward(grad: Tensor, x: Tensor) -> Tensor:
    return (2 * widen(x) * grad.unsqueeze(-1)).to(x.dtype).contiguous()


class _RowSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return implementation("row_squares", x)(x)

    @staticmethod
    @first_derivative("row_squares")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return implementation("row_squares_backward", x)(grad, x)


def row_squares(x: Tensor) -> Tensor:
    """Sum of squares over the last dimension: [..., D] -> [...], in fp32 (fp64 for fp64)."""
    return _RowSquares.apply(x)
