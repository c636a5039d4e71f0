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
from stars_fast.dual.forward_ad import Call, View, is_smooth, run_op, version_of, views_of
from stars_fast.dual.layout import pack_pair
from stars_fast.ops.first_derivative import first_derivative


class NoSecondDerivative(Exception):
    """A backward that can't be differentiated, with the reason."""


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
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in primals]
            outputs = call.differentiable(inputs, values)
            kept = _kept(outputs, inputs, values[smooth:])
            y_dots = _times_jacobian(outputs, inputs[: call.stacks], tangents)
        if any(version_of(x) != n for x, n in zip(values, versions, strict=True)):
            raise NoSecondDerivative("it writes into its arguments")
        if kept and call.grad_enabled:
            _check_kept(call, primals, values, kept)
        views = views_of(values, primals[: call.stacks], outputs)
        call.views = [None if view is None else View(view.stack, None) for view in views]
        pairs = zip(outputs, y_dots, strict=True)
        packed = [pack_pair(y.detach(), y_dot.to(y.dtype)) for y, y_dot in pairs]
        call.arrange = [arrange for _, arrange in packed]
        return tuple(memory for memory, _ in packed)

    @staticmethod
    @first_derivative("forward derivative")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        tensors = tuple(x.detach() for x in ctx.saved_tensors)
        primals, tangents = call.split(tensors)
        stacks = [arrange(g) for arrange, g in zip(call.arrange, grads, strict=True)]
        with call.same_draws(), torch.enable_grad():
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
    outputs: list[Tensor], inputs: list[Tensor], tangents: list[Tensor]
) -> list[Tensor]:
    """J x_dot, one for each output.

    Raises:
        NoSecondDerivative: the backward does not say how it depends on its cotangent.
    """
    grad = functools.partial(torch.autograd.grad, allow_unused=True)
    probes = [_probe(out).requires_grad_() for out in outputs]
    try:
        back = grad(outputs, inputs, probes, create_graph=True)
        pairs = [(g, x_dot) for g, x_dot in zip(back, tangents, strict=False) if g is not None]
        if not all(g.requires_grad for g, _ in pairs):
            raise NoSecondDerivative("its backward is not made of torch functions")
        found = grad([g for g, _ in pairs], probes, [x_dot for _, x_dot in pairs])
    except (RuntimeError, TypeError) as error:
        raise NoSecondDerivative(str(error)) from error
    y_dots = [torch.zeros_like(y) if d is None else d for y, d in zip(outputs, found, strict=True)]
    # <u, J x_dot> = <vjp(x; u), x_dot>, unless a part of the backward went unrecorded.
    with torch.no_grad():
        forth, size = _inner([(u, y_dot) for u, y_dot in zip(probes, y_dots, strict=True)])
        along, along_size = _inner(pairs)
        close = (forth - along).abs() <= 0.02 * torch.maximum(size, along_size)
    if not capturing() and not close:
        raise NoSecondDerivative("its backward computes a part without torch functions")
    return y_dots


def _probe(out: Tensor) -> Tensor:
    """A cotangent without zeros, drawn from nobody's generator."""
    steps = torch.arange(1, out.numel() + 1, device=out.device, dtype=torch.float32)
    return (1.5 + (2.4 * steps).sin()).to(out.dtype).view(out.shape)


def _inner(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The inner product over all pairs, and that of the absolute values."""
    wide = lambda x: (torch.view_as_real(x) if x.is_complex() else x).double()  # noqa: E731
    products = [wide(a.detach()).mul(wide(b)) for a, b in pairs]
    total = torch.stack([x.sum() for x in products]).sum()
    return total, torch.stack([x.abs().sum() for x in products]).sum()


def _kept(
    outputs: list[Tensor], inputs: list[Tensor], constants: tuple[Tensor, ...]
) -> list[Tensor]:
    """The floating-point tensors that a custom function has kept for its backward and autograd
    takes for constants: neither inputs nor outputs, nor arguments without a derivative.

    Raises:
        NoSecondDerivative: one is a weight that is none of its arguments.
    """
    nodes = {out.grad_fn for out in outputs}
    kind = torch.autograd.function.BackwardCFunction
    custom: list[Any] = [node for node in nodes if isinstance(node, kind)]
    held = [x for node in custom for x in (*node.saved_tensors, *vars(node).values())]
    places = {x.untyped_storage().data_ptr() for x in constants}
    parts = {x.untyped_storage().data_ptr() for x in inputs}  # of inputs, cut off from them
    kept = []
    for x in held:
        if not isinstance(x, Tensor) or not is_smooth(x):
            continue
        if not x.requires_grad:
            if x.untyped_storage().data_ptr() not in places:
                kept.append(x)
        elif x.grad_fn in nodes or any(x is each for each in inputs):
            continue
        elif x.untyped_storage().data_ptr() in parts:
            kept.append(x)
        else:
            raise NoSecondDerivative("it keeps a weight that is none of its arguments")
    return kept


def _check_kept(
    call: Call, primals: list[Tensor], values: tuple[Tensor, ...], kept: list[Tensor]
) -> None:
    """Refuse a function that keeps what moves with its inputs: its second derivative would lack a
    part. A mask does not move."""
    outputs = call.outputs
    with call.same_draws(), torch.enable_grad():
        steps = [1e-3 * _probe(x) * (x.abs() + 1e-3) for x in primals]
        nearby = [(x + step).requires_grad_() for x, step in zip(primals, steps, strict=True)]
        again = _kept(call.differentiable(nearby, values), nearby, values[call.smooth_inputs :])
    call.outputs = outputs
    if len(again) != len(kept) or not all(map(torch.equal, again, kept)):
        raise NoSecondDerivative(
            "it keeps for its backward what it computed on the way, which torch takes for a "
            "constant there (save inputs and outputs alone)"
        )
