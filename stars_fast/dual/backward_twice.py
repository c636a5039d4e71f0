"""The dual of one op that torch has no forward derivative of, by its own backward.

With vjp(x; u) the backward, which is linear in u, J x_dot is the gradient of <vjp(x; u), x_dot> by
u: the same for every u. Its reverse is the dual of the reverse, with the cotangents swapped,

    x_dot_bar = vjp(x; y_dot_bar),   x_bar = vjp(x; y_bar) + d/dx <x_dot, vjp(x; y_dot_bar)>

and asks of the op what a double backward asks. An op whose backward lies about its forward, such
as one that rounds and hands the gradient on, has the derivative that its backward says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stars_fast.base.capturing import capturing
from stars_fast.dual.backward_checks import (
    NoSecondDerivative,
    check_kept,
    check_leaves,
    check_linear,
    kept_numbers,
    probe,
)
from stars_fast.dual.forward_ad import Call, View, run_op, version_of, views_of
from stars_fast.dual.packing import nothing_packed
from stars_fast.ops.first_derivative import first_derivative


def jvp_by_backward(func: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> Any:
    """Run one op on Duals, as `forward_ad.jvp` does: outputs without a gradient are constants.

    Raises:
        NoSecondDerivative: its backward can't be differentiated.
    """
    call = Call(func, name, args, kwargs, may_leave_out=True)
    if any(callable(leaf) for leaf in call.leaves):
        # Its backward may run it, and add to the gradients of its weights.
        raise NoSecondDerivative("it takes a function or a module, whose weights no one sees")
    return run_op(_ByBackward, call, args, kwargs)


class _ByBackward(torch.autograd.Function):
    """One op on stacks."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        smooth = call.smooth_inputs
        ctx.save_for_backward(*(x.clone() for x in tensors[:smooth]), *tensors[smooth:])
        values = tuple(x.detach() for x in tensors)
        primals, tangents = call.split(values)
        versions = [version_of(x) for x in values]
        with torch.enable_grad(), nothing_packed():
            inputs = [x.detach().requires_grad_() for x in primals]
            try:
                outputs = call.differentiable(inputs, values)
            except RuntimeError as error:
                if "leaf Variable that requires grad" in str(error):
                    raise NoSecondDerivative("it writes into its arguments") from error
                raise
            kept = kept_numbers(outputs, inputs, values[smooth:])
            y_dots = _times_jacobian(outputs, inputs, tangents[: call.stacks], call.grad_enabled)
        if any(version_of(x) != n for x, n in zip(values, versions, strict=True)):
            raise NoSecondDerivative("it writes into its arguments")
        if kept and call.grad_enabled:
            check_kept(call, primals, values, kept)
        views = views_of(values, primals[: call.stacks], outputs)
        call.views = [None if view is None else View(view.stack, None) for view in views]
        return call.packed(zip(outputs, y_dots, strict=True))

    @staticmethod
    @first_derivative("forward derivative")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        tensors = tuple(x.detach() for x in ctx.saved_tensors)
        primals, tangents = call.split(tensors)
        stacks = [arrange(g) for arrange, g in zip(call.arrange, grads, strict=True)]
        with call.same_draws(), torch.enable_grad(), nothing_packed():
            inputs = [x.detach().requires_grad_() for x in primals]
            outputs = call.differentiable(inputs, tensors)
            call.outputs = []
            grad = functools.partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
            firsts = grad(outputs, inputs, [g[0] for g in stacks])
            dot_bars = grad(outputs, inputs, [g[1] for g in stacks], create_graph=True)
            pairs = zip(dot_bars[: call.stacks], tangents, strict=False)
            moving = [(g, x_dot) for g, x_dot in pairs if g is not None and g.requires_grad]
            seconds: Any = [None] * len(inputs)
            if moving:
                seconds = grad([g for g, _ in moving], inputs, [x_dot for _, x_dot in moving])
        bars = [_sum(*each) for each in zip(primals, firsts, seconds, strict=True)]
        halves = zip(bars, dot_bars[: call.stacks], strict=False)
        stack_bars = [torch.stack((bar, _sum(bar, dot_bar))) for bar, dot_bar in halves]
        return None, *stack_bars, *bars[call.stacks :], *[None] * (len(tensors) - len(inputs))


def _sum(like: Tensor, *terms: Tensor | None) -> Tensor:
    """The sum of gradients, where None is zero."""
    total = torch.zeros_like(like)
    for term in terms:
        total = total if term is None else total + term.detach()
    return total


def _times_jacobian(
    outputs: list[Tensor], inputs: list[Tensor], tangents: list[Tensor], weights_count: bool
) -> list[Tensor]:
    """J x_dot, one for each output. `weights_count` says whether anyone asks for gradients.

    Raises:
        NoSecondDerivative: the backward does not say how it depends on its cotangent.
    """
    grad = functools.partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    probes = [probe(out).requires_grad_() for out in outputs]
    try:
        back = grad(outputs, inputs, probes, create_graph=True)
        pairs = [(g, x_dot) for g, x_dot in zip(back, tangents, strict=False) if g is not None]
        if not all(g.requires_grad for g, _ in pairs):
            raise NoSecondDerivative("its backward is not made of torch functions")
        found: Any = [None] * len(probes)
        if pairs:
            found = grad([g for g, _ in pairs], probes, [x_dot for _, x_dot in pairs])
    except (RuntimeError, TypeError) as error:
        raise NoSecondDerivative(str(error)) from error
    y_dots = [torch.zeros_like(y) if d is None else d for y, d in zip(outputs, found, strict=True)]
    if not capturing():
        check_linear(outputs, inputs, probes, back)
    if weights_count:
        check_leaves([g for g in back if g is not None], [*inputs, *probes])
    return y_dots
