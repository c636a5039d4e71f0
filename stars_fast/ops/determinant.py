"""Determinant, dual forward and its backward, at any rank.

With X = U S V^T, sign = det U det V, p_i = prod of the s_k with k != i and p_ij of those with
k != i, j, a dash for U^T . V, and the second derivative in the directions X_dot and E
    D^2 = sign sum_ij p_ij (X_dot'_ii E'_jj - X_dot'_ij E'_ji), i != j:
    y_dot = sign sum_i p_i X_dot'_ii      G = sign U diag(p) V^T
    x_dot_bar = y_dot_bar G               x_bar = y_bar G + y_dot_bar sign U H V^T
    H_jj = sum_(i != j) p_ij X_dot'_ii    H_ji = -p_ij X_dot'_ij
Nothing is divided by a singular value, and the choice of U and V does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.arguments import check_stack
from stars_fast.ops.first_derivative import first_derivative


def _without(s: Tensor) -> tuple[Tensor, Tensor]:
    """p [..., N] and p_ij [..., N, N], 0 on the diagonal."""
    n = s.shape[-1]
    eye = torch.eye(n, dtype=torch.bool, device=s.device)
    one = torch.where(eye, 1.0, s.unsqueeze(-2)).prod(-1)
    left_out = eye.unsqueeze(0) | eye.unsqueeze(1)  # [i, j, k]: k is i or j
    two = torch.where(left_out, 1.0, s[..., None, None, :]).prod(-1)
    return one, two.masked_fill(eye, 0.0)


class _Determinant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(x[0])
        sign = (torch.linalg.det(u) * torch.linalg.det(vh)).round()
        p, pairs = _without(s)
        turned = u.mT @ x[1] @ vh.mT
        ctx.save_for_backward(u, vh, sign, p, pairs, turned)
        rise = sign * (p * turned.diagonal(dim1=-2, dim2=-1)).sum(-1)
        return torch.stack((torch.linalg.det(x[0]), rise))

    @staticmethod
    @first_derivative("determinant")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        u, vh, sign, p, pairs, turned = ctx.saved_tensors
        first = u @ (p.unsqueeze(-1) * vh)
        along = (pairs @ turned.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).squeeze(-1)
        second = u @ (torch.diag_embed(along) - pairs * turned.mT) @ vh
        a, b = ((sign * g)[..., None, None] for g in grad)
        return torch.stack((a * first + b * second, b * first))


def determinant(x: Tensor) -> Tensor:
    """Determinant of square matrices.

    Args:
        x: [2, ..., N, N], a stack of primal and tangent.

    Returns:
        [2, ...] in x's dtype.

    Raises:
        TypeError, ValueError: `x` is not floating point, no stack, or not of square matrices.
    """
    check_stack("determinant", "x", x)
    if x.dim() < 3 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"determinant: x: expected [2, ..., N, N], got {list(x.shape)}")
    return _Determinant.apply(x)
