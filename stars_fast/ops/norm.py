"""RMSNorm and LayerNorm, dual forward and its backward.

With r = rsqrt(mean(x^2) + eps), n = r x, c = mean(n * r x_dot):
    y = w n        n_dot = r x_dot - n c        y_dot = w n_dot
With a = w y_bar, b = w y_dot_bar, s = mean(b n), s_dot = mean(a n + b n_dot):
    x_dot_bar = r (b - n s)
    x_bar     = r (a - n_dot s - n s_dot) - r c (b - n s)
    w_bar     = sum(y_bar n + y_dot_bar n_dot)
LayerNorm is the same on the centred pair, plus a bias on y alone: x_bar and x_dot_bar are centred
too, and bias_bar = sum(y_bar). The statistics are recomputed in the backward: only x is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.arguments import check_parameter, check_stack
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.library import implementation, plain
from stars_fast.ops.precision import in_dtype, widen
from stars_fast.ops.selective import remember


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _normalise(x: Tensor, eps: float, dual: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """n (a stack with `dual`) and the row statistics r, c [..., 1]."""
    primal = x[0] if dual else x
    r = torch.rsqrt(primal.square().mean(-1, keepdim=True) + eps)
    if not dual:
        return x * r, r, None
    # Nothing in place: selective checkpointing may hold what an op returned.
    n, n_dot = x[0] * r, x[1] * r
    c = (n * n_dot).mean(-1, keepdim=True)
    return torch.stack((n, torch.addcmul(n_dot, n, c, value=-1))), r, c


def _normalise_backward(g: Tensor, n: Tensor, r: Tensor, c: Tensor | None) -> Tensor:
    """The cotangent of x from that of n."""
    if c is None:
        return torch.addcmul(g, n, (g * n).mean(-1, keepdim=True), value=-1) * r
    s = (g[1] * n[0]).mean(-1, keepdim=True)
    s_dot = (g * n).sum(0).mean(-1, keepdim=True)
    x_dot_bar = torch.addcmul(g[1], n[0], s, value=-1) * r
    x_bar = torch.addcmul(torch.addcmul(g[0], n[1], s, value=-1), n[0], s_dot, value=-1) * r
    return torch.stack((torch.addcmul(x_bar, x_dot_bar, c, value=-1), x_dot_bar))


def _row_sum(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(0) if x.dim() > 1 else x


@plain("norm")
def plain_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centre: bool, dual: bool
) -> Tensor:
    wide = widen(x).contiguous()
    y, _, _ = _normalise(_centred(wide) if centre else wide, eps, dual)
    if weight is not None:
        y = y * widen(weight)
    if bias is not None:
        y = torch.stack((y[0] + widen(bias), y[1])) if dual else y + widen(bias)
    return y.to(x.dtype)


@plain("norm_backward")
def plain_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    centre: bool,
    dual: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, g = widen(x).contiguous(), widen(grad).contiguous()
    n, r, c = _normalise(_centred(wide) if centre else wide, eps, dual)
    none = g.new_empty(0)
    weight_bar = _row_sum(g * n) if weight_grad else none
    bias_bar = _row_sum(g[0] if dual else g).clone() if bias_grad else none
    x_bar = _normalise_backward(g if weight is None else g * widen(weight), n, r, c)
    return (_centred(x_bar) if centre else x_bar).to(x.dtype), weight_bar, bias_bar


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centre: bool,
        dual: bool,
    ) -> Tensor:
        # For the weight alone: eager keeps a normalised copy, so x may be written to afterwards.
        ctx.save_for_backward(x if ctx.needs_input_grad[0] or weight is None else x.clone(), weight)
        ctx.options = eps, centre, dual
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = implementation("norm", x)(x, weight, bias, eps, centre, dual)
        kept = ctx.needs_input_grad[0]  # else a copy is, or nothing
        return remember(y, "norm", x, weight, bias, eps, centre, dual) if kept else y

    @staticmethod
    @first_derivative("norm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        backward = implementation("norm_backward", x)
        x_bar, w_bar, b_bar = backward(grad, x, weight, *ctx.options, needs_weight, needs_bias)
        return (
            x_bar,
            w_bar.to(weight.dtype) if needs_weight else None,
            b_bar.to(ctx.bias_dtype) if needs_bias else None,
            None,
            None,
            None,
        )


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    dual: bool = True,
) -> Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: [2, ..., D], or [..., D] with `dual=False`.
        weight: [D] or None.
        eps: added to the mean square.
        dtype: of the result; by default that of `x`.
        dual: whether `x` is a stack of primal and tangent.

    Returns:
        x's shape. Statistics are in fp32 for 16-bit inputs.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape, named.
    """
    check_stack("rms_norm", "x", x, dual)
    check_parameter("rms_norm", "weight", weight, x)
    return in_dtype(lambda x: _Norm.apply(x, weight, None, eps, False, dual), x, dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    dual: bool = True,
) -> Tensor:
    """LayerNorm over the last dimension.

    Args:
        x: [2, ..., D], or [..., D] with `dual=False`.
        weight: [D] or None.
        bias: [D] or None.
        eps: added to the variance.
        dtype: of the result; by default that of `x`.
        dual: whether `x` is a stack of primal and tangent.

    Returns:
        x's shape. Statistics are in fp32 for 16-bit inputs.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape, named.
    """
    check_stack("layer_norm", "x", x, dual)
    check_parameter("layer_norm", "weight", weight, x)
    check_parameter("layer_norm", "bias", bias, x)
    return in_dtype(lambda x: _Norm.apply(x, weight, bias, eps, True, dual), x, dtype)
