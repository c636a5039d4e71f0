"""logcumsumexp over the last dimension, dual forward and its backward.

With d_i = x_i - y_(i-1), b = sigmoid(d) and a = 1 - b = sigmoid(-d) the scan is a chain of steps
    y_i     = y_(i-1) + softplus(d_i)
    y_dot_i = a_i y_dot_(i-1) + b_i x_dot_i
and with e_i = a_i b_i (x_dot_i - y_dot_(i-1)), the derivative of y_dot_i by d_i, its reverse is
    g_i = y_dot_bar_i + a_(i+1) g_(i+1)                       x_dot_bar_i = b_i g_i
    h_i = y_bar_i - e_(i+1) g_(i+1) + a_(i+1) h_(i+1)         x_bar_i     = b_i h_i + e_i g_i
Every weight lies in [0, 1] and no difference of large terms is taken: nothing overflows or cancels,
whatever the spread of x. Each line is a linear recurrence, in O(n log n) by doubling. Before the
first finite x the value is -inf and its derivative 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.arguments import check_stack
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.precision import widen


def linear_recurrence(a: Tensor, b: Tensor) -> Tensor:
    """s [..., N] with s_i = a_i s_(i-1) + b_i and s_(-1) = 0, by doubling."""
    step = 1
    while step < b.shape[-1]:
        decay = a[..., step:]
        b = torch.cat((b[..., :step], torch.addcmul(b[..., step:], decay, b[..., :-step])), -1)
        a = torch.cat((a[..., :step], decay * a[..., :-step]), -1)
        step *= 2
    return b


def _before(x: Tensor, first: float) -> Tensor:
    """x_(i-1), with `first` before the first."""
    return torch.cat((torch.full_like(x[..., :1], first), x[..., :-1]), -1)


def _after(x: Tensor) -> Tensor:
    """x_(i+1), with 0 after the last."""
    return torch.cat((x[..., 1:], torch.zeros_like(x[..., :1])), -1)


def _steps(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, a and b. The sum is kept relative to the greatest term so far, whose distance from others
    is the one thing that is rounded: an offset of x costs nothing."""
    top = torch.cummax(x, -1).values
    above = _before(top, -torch.inf)
    share, decay = (
        # Where both are infinite: 1 for +inf, and 0 for -inf, when nothing has come yet.
        torch.where(z == top, 0.0, z - top).masked_fill(z == -torch.inf, -torch.inf).exp_()
        for z in (x, above)
    )
    total = linear_recurrence(decay, share)
    safe = torch.where(total > 0, total, 1.0)
    return top + total.log(), _before(total, 0.0) * decay / safe, share / safe


class _LogCumSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = widen(x)
        y, a, b = _steps(wide[0])
        return torch.stack((y, linear_recurrence(a, b * wide[1]))).to(x.dtype)

    @staticmethod
    @first_derivative("logcumsumexp")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide, bar = widen(x), widen(grad)
        _, a, b = _steps(wide[0])
        y_dot = linear_recurrence(a, b * wide[1])
        e = a * b * (wide[1] - _before(y_dot, 0.0))

        def backwards(s: Tensor) -> Tensor:
            return linear_recurrence(_after(a).flip(-1), s.flip(-1)).flip(-1)

        g = backwards(bar[1])
        h = backwards(bar[0] - _after(e * g))
        return torch.stack((torch.addcmul(e * g, b, h), b * g)).to(x.dtype)


def logcumsumexp(x: Tensor) -> Tensor:
    """Logarithm of the running sum of exponentials over the last dimension.

    Args:
        x: [2, ..., N], a stack of primal and tangent.

    Returns:
        x's shape and dtype. 16-bit inputs are computed in fp32.

    Raises:
        TypeError, ValueError: `x` is not floating point, or no stack.
    """
    check_stack("logcumsumexp", "x", x)
    return _LogCumSumExp.apply(x)
