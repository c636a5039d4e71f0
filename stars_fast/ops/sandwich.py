"""End of one sub-layer and start of the next, in one pass over memory.

    h = residual + RMSNorm(branch)        x = RMSNorm(h)

the chain of sandwich-norm layers (Ouro); without `weight_out` the branch is added as it is, the
chain of pre-norm layers (Llama). Formulas of the norms: `norm.py`. h is saved instead of
`residual`; the statistics are recomputed in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.arguments import check_parameter, check_stack
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.library import implementation, plain
from stars_fast.ops.norm import plain_norm, plain_norm_backward
from stars_fast.ops.precision import widen
from stars_fast.ops.selective import remember


@plain("sandwich")
def _sandwich(
    branch: Tensor,
    residual: Tensor,
    weight_out: Tensor | None,
    weight_in: Tensor,
    eps_out: float,
    eps_in: float,
    dual: bool,
) -> tuple[Tensor, Tensor]:
    wide = widen(branch).contiguous()
    if weight_out is not None:
        wide = plain_norm(wide, weight_out, None, eps_out, False, dual)
    h = (widen(residual) + wide).to(residual.dtype).contiguous()
    return h, plain_norm(h, weight_in, None, eps_in, False, dual)


@plain("sandwich_backward")
def _sandwich_backward(
    h_bar: Tensor,
    x_bar: Tensor,
    branch: Tensor,
    h: Tensor,
    weight_out: Tensor | None,
    weight_in: Tensor,
    eps_out: float,
    eps_in: float,
    dual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from_x, in_bar, none = plain_norm_backward(
        widen(x_bar), widen(h), weight_in, eps_in, False, dual, True, False
    )
    total = widen(h_bar) + from_x
    residual_bar = total.to(h.dtype).contiguous()
    if weight_out is None:
        return branch.new_empty(0), residual_bar, none, in_bar
    branch_bar, out_bar, _ = plain_norm_backward(
        total, widen(branch), weight_out, eps_out, False, dual, True, False
    )
    return branch_bar.to(branch.dtype), residual_bar, out_bar, in_bar


class _Sandwich(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        residual: Tensor,
        weight_out: Tensor | None,
        weight_in: Tensor,
        eps_out: float,
        eps_in: float,
        dual: bool,
    ) -> tuple[Tensor, Tensor]:
        forward = implementation("sandwich", branch)
        h, x = forward(branch, residual, weight_out, weight_in, eps_out, eps_in, dual)
        ctx.save_for_backward(branch, h, weight_out, weight_in)
        ctx.options = eps_out, eps_in, dual
        return h, remember(x, "norm", h, weight_in, None, eps_in, False, dual)

    @staticmethod
    @first_derivative("sandwich")
    def backward(ctx: Any, h_bar: Tensor, x_bar: Tensor) -> tuple[Tensor | None, ...]:
        branch, h, weight_out, weight_in = ctx.saved_tensors
        backward = implementation("sandwich_backward", branch)
        branch_bar, residual_bar, out_bar, in_bar = backward(
            h_bar, x_bar, branch, h, weight_out, weight_in, *ctx.options
        )
        return (
            residual_bar if weight_out is None else branch_bar,
            residual_bar,
            None if weight_out is None else out_bar.to(weight_out.dtype),
            in_bar.to(weight_in.dtype),
            None,
            None,
            None,
        )


def sandwich(
    branch: Tensor,
    residual: Tensor,
    weight_out: Tensor | None,
    weight_in: Tensor,
    eps_out: float,
    eps_in: float,
    *,
    dual: bool = True,
) -> tuple[Tensor, Tensor]:
    """The residual stream after a sub-layer, and the normed input of the next.

    Args:
        branch: [2, ..., D], or [..., D] with `dual=False`: what the sub-layer gave.
        residual: the same shape and dtype.
        weight_out: [D], of the norm on the branch; None for no norm there.
        weight_in: [D], of the norm on the sum.
        eps_out, eps_in: of the two norms.
        dual: whether the tensors are stacks of primal and tangent.

    Returns:
        h = residual + RMSNorm(branch) and x = RMSNorm(h), both of branch's shape.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape, named.
    """
    check_stack("sandwich", "branch", branch, dual)
    check_parameter("sandwich", "weight_out", weight_out, branch)
    check_parameter("sandwich", "weight_in", weight_in, branch)
    if branch.shape != residual.shape or branch.dtype != residual.dtype:
        raise ValueError(
            f"sandwich: residual: expected branch's shape and dtype ({list(branch.shape)}, "
            f"{branch.dtype}), got {list(residual.shape)}, {residual.dtype}"
        )
    return _Sandwich.apply(branch, residual, weight_out, weight_in, eps_out, eps_in, dual)
