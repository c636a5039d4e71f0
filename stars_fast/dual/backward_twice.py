"""The dual of one op that torch has no forward derivative of, by its own backward.

With vjp(x; u) the backward, which is linear in u, J x_dot is the gradient of <vjp(x; u), x_dot> by
u: the same for every u. Its reverse is the dual of the reverse, with the cotangents swapped,

    x_dot_bar = vjp(x; y_dot_bar),   x_bar = vjp(x; y_bar) + d/dx <x_dot, vjp(x; y_dot_bar)>

and asks of the op what a double backward asks. An op whose backward lies about its forward, such
as one that rounds and hands the gradient on, has the derivative that its backward says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stars_fast.base.capturing import capturing
from stars_fast.dual.forward_ad import Call, View, is_smooth, run_op, version_of, views_of
from stars_fast.dual.layout import pack_pair
from stars_fast.ops.first_derivative import first_derivative

packing_hooks = torch._C._autograd._top_saved_tensors_default_hooks


_STEPS = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-4, torch.complex64: 1e-4}
_TOLERANCE = {torch.finfo(torch.float64).eps: 1e-6, torch.finfo(torch.float32).eps: 5e-3}


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
        with torch.enable_grad(), _nothing_packed():
            inputs = [x.detach().requires_grad_() for x in primals]
            try:
                outputs = call.differentiable(inputs, values)
            except RuntimeError as error:
                if "leaf Variable that requires grad" in str(error):
                    raise NoSecondDerivative("it writes into its arguments") from error
                raise
            kept = _kept(outputs, inputs, values[smooth:])
            y_dots = _times_jacobian(outputs, inputs, tangents[: call.stacks], call.grad_enabled)
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
        with call.same_draws(), torch.enable_grad(), _nothing_packed():
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


@contextmanager
def _nothing_packed() -> Iterator[None]:
    """A region in which autograd saves tensors as they are: what a checkpoint packs it would
    compute again when it is read here."""
    around = []
    while hooks := packing_hooks(False):
        around.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(around):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


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
    grad = functools.partial(torch.autograd.grad, allow_unused=True)
    probes = [_probe(out).requires_grad_() for out in outputs]
    try:
        back = grad(outputs, inputs, probes, create_graph=True)
        pairs = [(g, x_dot) for g, x_dot in zip(back, tangents, strict=False) if g is not None]
        if not all(g.requires_grad for g, _ in pairs):
            raise NoSecondDerivative("its backward is not made of torch functions")
        found: Any = [None] * len(probes)
        if pairs:
            found = grad(
                [g for g, _ in pairs],
                probes,
                [x_dot for _, x_dot in pairs],
                retain_graph=weights_count,
            )
    except (RuntimeError, TypeError) as error:
        raise NoSecondDerivative(str(error)) from error
    y_dots = [torch.zeros_like(y) if d is None else d for y, d in zip(outputs, found, strict=True)]
    if not capturing():
        _check_linear(outputs, inputs)
    if weights_count:
        _check_leaves([g for g in back if g is not None], [*inputs, *probes])
    return y_dots


def _check_linear(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """For w = vjp(x; u), <u, J w> = |w|^2, a sum of squares in which nothing cancels, and
    vjp(x; -u) = -w: unless a part of the backward went unrecorded, or it is not linear, as it
    clips, or adds the gradient of a penalty, which is there for u = 0 too. What is not finite says
    nothing."""
    grad = functools.partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    probes = [_probe(out).requires_grad_() for out in outputs]
    back = grad(outputs, inputs, probes, create_graph=True)
    none = grad(outputs, inputs, [torch.zeros_like(out) for out in outputs])
    close = all(bool(((g == 0) | ~g.isfinite()).all()) for g in none if g is not None)
    least = max((torch.finfo(x.dtype).eps for x in (*outputs, *inputs)), default=0.0)
    accuracy = _TOLERANCE.get(least, 0.02)
    sides = [grad(outputs, inputs, [sign * _probe(y, 0.2) for y in outputs]) for sign in (1, -1)]
    both = [(one, other) for one, other in zip(*sides, strict=True) if one is not None]
    odd, size = _inner([(a + b, a + b) for a, b in both]), _inner([(a, a) for a, _ in both])
    close = close and not bool((odd > accuracy**2 * size) & torch.isfinite(odd + size))
    large = 4.0 if any(out.dtype == torch.float16 for out in outputs) else 1024.0
    for others in (probes, [large * _probe(out, center=0.2) for out in outputs]):
        found = grad(outputs, inputs, others)
        pairs = [
            (g, w.detach())
            for g, w in zip(back, found, strict=True)
            if g is not None and g.requires_grad and w is not None and w.numel()
        ]
        if not pairs:
            break
        units = [w / w.abs().amax().clamp(min=torch.finfo(w.dtype).tiny) for _, w in pairs]
        forth = grad([g for g, _ in pairs], probes, units)
        sums = [(u, y_dot) for u, y_dot in zip(others, forth, strict=True) if y_dot is not None]
        left = _inner(sums)
        right = _inner([(w, unit) for (_, w), unit in zip(pairs, units, strict=True)])
        apart = (left - right).abs() > accuracy * right
        close = close and not bool(apart & torch.isfinite(left + right))
    if not close:
        raise NoSecondDerivative(
            "its backward computes a part without torch functions, or is not linear in the "
            "gradient that it is given"
        )


def _check_leaves(back: list[Tensor], known: list[Tensor]) -> None:
    """Refuse a backward that uses a weight which is none of the arguments."""
    nodes: list[Any] = [g.grad_fn for g in back]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is x for x in known):
            raise NoSecondDerivative("it keeps a weight that is none of its arguments")
        nodes += [each for each, _ in node.next_functions]


def _probe(out: Tensor, center: float = 1.5) -> Tensor:
    """A cotangent without zeros, drawn from nobody's generator."""
    steps = torch.arange(1, out.numel() + 1, device=out.device, dtype=torch.float32)
    return (center + (2.4 * steps).sin()).to(out.dtype).view(out.shape)


def _inner(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The real inner product over all pairs."""
    wide = lambda x: (torch.view_as_real(x) if x.is_complex() else x).double()  # noqa: E731
    products = [wide(a.detach()).mul(wide(b.detach())).sum() for a, b in pairs]
    return torch.stack(products).sum() if products else torch.zeros((), dtype=torch.float64)


def _kept(
    outputs: list[Tensor], inputs: list[Tensor], constants: tuple[Tensor, ...]
) -> list[Tensor]:
    """The floating-point numbers that a custom function has kept for its backward and autograd
    takes for constants: neither inputs nor outputs, nor arguments without a derivative.

    Raises:
        NoSecondDerivative: one is a weight that is none of its arguments.
    """
    nodes = {out.grad_fn for out in outputs}
    kind = torch.autograd.function.BackwardCFunction
    custom: list[Any] = [node for node in nodes if isinstance(node, kind)]
    held = tree_leaves([(node.saved_tensors, vars(node)) for node in custom])
    places = {x.untyped_storage().data_ptr() for x in constants}
    parts = {x.untyped_storage().data_ptr() for x in inputs}  # of inputs, cut off from them
    kept = [torch.tensor(x) for x in held if type(x) is float]
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
    part. A mask does not move, but for what is next to its edge."""
    outputs = call.outputs
    with call.same_draws(), torch.enable_grad(), _nothing_packed():
        steps = [_step_of(x) * _probe(x) * (x.abs() + 1e-3) for x in primals]
        nearby = [(x + step).requires_grad_() for x, step in zip(primals, steps, strict=True)]
        again = _kept(call.differentiable(nearby, values), nearby, values[call.smooth_inputs :])
    call.outputs = outputs
    if len(again) != len(kept) or not all(map(_stays, again, kept)):
        raise NoSecondDerivative(
            "it keeps for its backward what it computed on the way, which torch takes for a "
            "constant there (save inputs and outputs alone)"
        )


def _step_of(x: Tensor) -> float:
    """A relative step that the values of a dtype show."""
    return _STEPS.get(x.dtype, 4 * torch.finfo(x.dtype).eps)


def _stays(before: Tensor, after: Tensor) -> bool:
    """Whether a step moves nothing, or makes few entries jump."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    moved = (before != after) & ~(before.isnan() & after.isnan())
    far = 10 * _step_of(before) * torch.maximum(before.abs(), after.abs())
    jumps = (before - after).abs() > far
    return not bool((moved & ~jumps).any()) and int(moved.sum()) <= max(1, moved.numel() // 20)
