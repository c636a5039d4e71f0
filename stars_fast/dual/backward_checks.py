"""Whether a backward can stand for a derivative: what `backward_twice` asks of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stars_fast.dual.forward_ad import Call, is_smooth
from stars_fast.dual.packing import nothing_packed

_STEPS = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-4, torch.complex64: 1e-4}
_TOLERANCE = {torch.finfo(torch.float64).eps: 1e-6, torch.finfo(torch.float32).eps: 5e-3}


class NoSecondDerivative(Exception):
    """A backward that can't be differentiated, with the reason."""


def check_linear(
    outputs: list[Tensor], inputs: list[Tensor], probes: list[Tensor], back: Sequence[Tensor | None]
) -> None:
    """For w = vjp(x; u), <u, J w> = |w|^2, a sum of squares in which nothing cancels, and
    vjp(x; -u) = -w: unless a part of the backward went unrecorded, or it is not linear, as it
    clips, or adds the gradient of a penalty, which is there for u = 0 too. What is not finite says
    nothing.

    Args:
        back: vjp(x; probes), whose graph leads to `probes`.

    Raises:
        NoSecondDerivative: it does not hold.
    """
    grad = functools.partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    coarsest = max((torch.finfo(x.dtype).eps for x in (*outputs, *inputs)), default=0.0)
    accuracy = _TOLERANCE.get(coarsest, 0.02)
    large = 4.0 if any(out.dtype == torch.float16 for out in outputs) else 1024.0
    far = [large * probe(out, center=0.2) for out in outputs]
    at_zero, opposite, at_far = (
        grad(outputs, inputs, others)
        for others in ([0 * u for u in far], [-u.detach() for u in probes], far)
    )
    wrong = [((g != 0) & g.isfinite()).any() for g in at_zero if g is not None]
    sides = [(a, b) for a, b in zip(back, opposite, strict=True) if a is not None]
    sums = [(a + b, a + b) for a, b in sides if b is not None]
    wrong.append(_above(_inner(sums), accuracy**2 * _inner([(a, a) for a, _ in sides])))
    for others, found in ((probes, back), (far, at_far)):
        pairs = [
            (g, w.detach())
            for g, w in zip(back, found, strict=True)
            if g is not None and g.requires_grad and w is not None and w.numel()
        ]
        if not pairs:
            break
        units = [w / w.abs().amax().clamp(min=torch.finfo(w.dtype).tiny) for _, w in pairs]
        forth = grad([g for g, _ in pairs], probes, units)
        along = [(u, y_dot) for u, y_dot in zip(others, forth, strict=True) if y_dot is not None]
        right = _inner([(w, unit) for (_, w), unit in zip(pairs, units, strict=True)])
        wrong.append(_above((_inner(along) - right).abs(), accuracy * right))
    if any(map(bool, wrong)):
        raise NoSecondDerivative(
            "its backward computes a part without torch functions, or is not linear in the "
            "gradient that it is given"
        )


def _above(found: Tensor, bound: Tensor) -> Tensor:
    return (found > bound) & torch.isfinite(found + bound)


def check_leaves(back: list[Tensor], known: list[Tensor]) -> None:
    """Refuse a backward that uses a weight which is none of the arguments.

    Raises:
        NoSecondDerivative: it does.
    """
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


def probe(out: Tensor, center: float = 1.5) -> Tensor:
    """A cotangent without zeros, drawn from nobody's generator."""
    steps = torch.arange(1, out.numel() + 1, device=out.device, dtype=torch.float32)
    return (center + (2.4 * steps).sin()).to(out.dtype).view(out.shape)


def _inner(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The real inner product over all pairs."""
    products = [_wide(a).mul(_wide(b)).sum() for a, b in pairs]
    return torch.stack(products).sum() if products else torch.zeros((), dtype=torch.float64)


def _wide(x: Tensor) -> Tensor:
    return (torch.view_as_real(x.detach()) if x.is_complex() else x.detach()).double()


def kept_numbers(
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


def check_kept(
    call: Call, primals: list[Tensor], values: tuple[Tensor, ...], kept: list[Tensor]
) -> None:
    """Refuse a function that keeps what moves with its inputs: its second derivative would lack a
    part. A mask does not move, but for what is next to its edge.

    Raises:
        NoSecondDerivative: it does.
    """
    outputs, step = call.outputs, max(map(_step_of, primals))
    with call.same_draws(), torch.enable_grad(), nothing_packed():
        nearby = [(x + step * probe(x) * (x.abs() + 1e-3)).requires_grad_() for x in primals]
        outputs_there = call.differentiable(nearby, values)
        again = kept_numbers(outputs_there, nearby, values[call.smooth_inputs :])
    call.outputs = outputs
    pairs = zip(again, kept, strict=False)
    if len(again) != len(kept) or not all(_stays(x, y, step) for x, y in pairs):
        raise NoSecondDerivative(
            "it keeps for its backward what it computed on the way, which torch takes for a "
            "constant there (save inputs and outputs alone)"
        )


def _step_of(x: Tensor) -> float:
    """A relative step that the values of a dtype show."""
    return _STEPS.get(x.dtype, 4 * torch.finfo(x.dtype).eps)


def _stays(before: Tensor, after: Tensor, step: float) -> bool:
    """Whether a relative step of the inputs moves nothing, or makes few entries jump."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    moved = (before != after) & ~(before.isnan() & after.isnan())
    jumps = (before - after).abs() > 10 * step * torch.maximum(before.abs(), after.abs())
    return not bool((moved & ~jumps).any()) and int(moved.sum()) <= max(1, moved.numel() // 20)
