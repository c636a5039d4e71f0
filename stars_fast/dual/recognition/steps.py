"""Ops that wait: a formula is known by the ops that a block really calls, one after the other.

A norm is called as eight ops and fused as one. Whether those eight are the formula is seen only
when they are called, in this shape and dtype, with this flag set and this branch taken. So an op
that can be part of a known formula does not run when it is called: it gives a Dual without a stack,
whose `Step` says which op it stands for. The next op either continues the formula, up to the one
that completes it and runs the fused op, or it asks for the stack: then the waiting ops run as they
were written (`Step.settle`). Nothing of the block's classes or modules is looked at or changed.

What could tell a late op from one in its place is held against it: ops run in the grad mode and
autocast in which they were called, every in-place op lets all that waits run first, and what was
written to in another way since (its version says so) is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.registry import RECORDERS, Recorder, objects_named, observed, report
from stars_fast.dual.running import add_waiting, state
from stars_fast.dual.tensor import QUICK, Dual, answer

_WIDE = (torch.float32, torch.float64)


class Step:
    """One op that waits.

    Attributes:
        kind: which part of which formula.
        of: the Dual that it is called on.
        value: what the formula has gathered so far.
        dtype, shape, device: of the result.
        smooth: whether `of` or what else it uses requires a gradient.
        grad: whether gradients were on when it was called.
        called: (function, args, kwargs), or a function that gives the same.
        held: tensors that must not change before it runs, with their versions.
    """

    kind: str
    of: Dual
    value: Any
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    smooth: bool
    grad: bool
    called: tuple[Any, tuple, dict] | Callable[[], Any]
    held: tuple[tuple[Tensor, int], ...]

    __slots__ = (
        "called",
        "device",
        "dtype",
        "grad",
        "held",
        "kind",
        "of",
        "shape",
        "smooth",
        "value",
    )

    def settle(self, dual: Dual) -> None:
        """Run the ops that `dual`, which waits for this one, needs: from the first."""
        chain = [dual]
        while (before := chain[-1].step.of).step is not None:
            chain.append(before)
        for each in reversed(chain):
            if each.step is not None:
                _run(each)


_inference = torch.is_inference_mode_enabled
_grad = torch.is_grad_enabled
_forward_mode = torch._C._is_fwd_grad_enabled


def is_narrowed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether autocast may give an op on this dtype another one: it widens narrow ones."""
    return dtype not in _WIDE and torch.is_autocast_enabled(device.type)


def step_of(x: Any, kind: str) -> Step | None:
    """The step that a Dual waits for, if it is of this kind and the op at hand can follow it."""
    if type(x) is not Dual:
        return None
    step = x.step
    if step is None or step.kind != kind or step.grad != _grad():
        return None
    return None if step.dtype not in _WIDE and is_narrowed(step.dtype, step.device) else step


def is_open(x: Any) -> bool:
    """Whether a formula may begin at x: a Dual of real numbers, outside of inference mode."""
    if type(x) is not Dual or _inference():
        return False
    if x.step is not None:
        return True
    stack = x.stack
    return not (stack.is_complex() or stack.is_inference())


def is_plain(x: Any) -> bool:
    """Whether x is an ordinary tensor of floating-point numbers, whose writes are counted."""
    kind = type(x)
    return (
        (kind is Tensor or kind is torch.nn.Parameter)
        and x.is_floating_point()
        and not x.is_inference()
    )


def dtype_of(x: Dual) -> torch.dtype:
    """x's dtype, without waking it."""
    return x.stack.dtype if x.step is None else x.step.dtype


def shape_of(x: Dual) -> torch.Size:
    """x's shape, without waking it."""
    return x.stack.shape[1:] if x.step is None else x.step.shape


def device_of(x: Dual) -> torch.device:
    """x's device, without waking it."""
    return x.stack.device if x.step is None else x.step.device


def wait(
    kind: str,
    of: Dual,
    called: tuple[Any, tuple, dict] | Callable[[], Any],
    value: Any = None,
    dtype: torch.dtype | None = None,
    shape: torch.Size | None = None,
    uses: Tensor | None = None,
) -> Dual:
    """The Dual of an op that waits.

    Args:
        kind, of, called, value: see `Step`.
        dtype, shape: of the result; by default those of `of`.
        uses: a plain tensor among its arguments.
    """
    step = Step()
    step.kind, step.of, step.called, step.value = kind, of, called, value
    before = of.step
    if before is None:
        source = of.stack
        step.dtype, step.shape = dtype or source.dtype, shape or source.shape[1:]
        step.device, step.smooth = source.device, source.requires_grad
        step.held = ((source, source._version),)
    else:  # it watches over what it reads
        step.dtype, step.shape = dtype or before.dtype, shape or before.shape
        step.device, step.smooth = before.device, before.smooth
        step.held = ()
    if uses is not None:
        step.held += ((uses, uses._version),)
        step.smooth = step.smooth or uses.requires_grad
    step.grad = _grad()
    dual = Dual.waiting(step)
    add_waiting(dual)
    return dual


def complete(op: str, formula: str, stack: Tensor, parts: tuple) -> Dual:
    """The result of a fused op that stands for a formula; `explain` wants to know what it is made
    of."""
    if observed():
        stack.made = op, parts  # type: ignore[attr-defined]
        report(formula, "recognised")
    report(op, "fused")
    return Dual(stack)


def _run(dual: Dual) -> None:
    step = dual.step
    with _as_called(step):
        check_held(step)
        called = step.called
        result = answer(*called) if type(called) is tuple else called()
        stack = result.stack
    assert stack.shape[1:] == step.shape, (step.kind, stack.shape, step.shape)
    assert stack.dtype == step.dtype, (step.kind, stack.dtype, step.dtype)
    dual.__dict__.update(result.__dict__)
    dual.step = None


@contextmanager
def _as_called(step: Step) -> Iterator[None]:
    """The grad mode in which an op was called. Autocast is off for narrow numbers: under it they
    would not wait; others it leaves alone. Nothing waits in inference mode, nor in the forward of a
    custom autograd function, where forward mode is off too. The pass does not look on: for it each
    call of a tensor's own is one before which all that waits has to run, this op too."""
    with ExitStack() as stack:
        running = state.running
        if running is not None and running.looks:
            stack.enter_context(running.looking_away())
        if not _forward_mode():
            stack.enter_context(torch.inference_mode(False))
        if step.grad != _grad():
            stack.enter_context(torch.set_grad_enabled(step.grad))
        if is_narrowed(dtype_of(step.of), step.device):
            stack.enter_context(torch.autocast(step.device.type, enabled=False))
        yield


def check_held(step: Step) -> None:
    """Raise if a tensor that a waiting op reads was written to in a way that nobody saw."""
    check_unchanged(step.held)


def check_unchanged(held: tuple[tuple[Tensor, int], ...]) -> None:
    """Raise if one of these tensors has another version than the one beside it."""
    for source, version in held:
        freed = source.numel() and not source.untyped_storage().nbytes()
        if freed or source._version != version:
            raise RuntimeError(
                f"stars_fast: a tensor of shape {list(source.shape)} was written in place, through "
                "a plain tensor, before an op that reads it had run; clone it before the write, or "
                "run the block under stars_fast.recognition(False)"
            )


def recorder(*names: str) -> Callable[[Recorder], Recorder]:
    """Decorator: this function is asked first what a call of one of `names` means. It returns a
    Dual, or None where the call is no part of a formula that it knows. One that is registered
    later is asked after those before it."""

    def register(function: Recorder) -> Recorder:
        for target in {target for name in names for target in objects_named(name)}:
            before = RECORDERS.get(target)
            RECORDERS[target] = function if before is None else _either(before, function)
        return function

    return register


def _either(first: Recorder, second: Recorder) -> Recorder:
    def ask_both(func: Any, args: tuple, kwargs: dict) -> Any:
        result = first(func, args, kwargs)
        return second(func, args, kwargs) if result is None else result

    return ask_both


# -- answers that wake nothing


def _register_quick() -> None:
    answers: dict[str, Callable[[Dual], Any]] = {
        "dtype": dtype_of,
        "shape": shape_of,
        "device": device_of,
        "ndim": lambda x: len(shape_of(x)),
    }
    for name, quick in answers.items():
        for target in objects_named(name, (torch.Tensor,)):
            QUICK[target] = quick


_register_quick()


@recorder("size")
def _size(func: Any, args: tuple, kwargs: dict) -> Any:
    if len(args) != 1 or kwargs:
        return None
    return shape_of(args[0])


@recorder("dim", "ndimension")
def _dim(func: Any, args: tuple, kwargs: dict) -> Any:
    return len(shape_of(args[0])) if len(args) == 1 else None
