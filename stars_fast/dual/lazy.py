"""Ops that wait: a formula is known by the ops that a block really calls, one after the other.

A norm is called as eight ops and fused as one. Whether those eight are the formula is seen only
when they are called, in this shape and dtype, with this flag set and this branch taken. So an op
that can be part of a known formula does not run when it is called: it gives a Dual without a stack,
whose `Step` says which op it stands for. The next op either continues the formula, up to the one
that completes it and runs the fused op, or it asks for the stack: then the waiting ops run as they
were written (`settle`). Nothing of the block's classes or modules is looked at or changed.

What could tell a late op from one in its place is held against it: ops run in the grad mode and
autocast in which they were called, every in-place op lets all that waits run first, and what was
written to in another way since (its version says so) is an error.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.registry import objects_named
from stars_fast.dual.tensor import Dual, answer, set_recorder

Recorder = Callable[[Any, tuple, dict], "Dual | None"]
Mode = tuple[bool, "torch.dtype | None"]


class Step:
    """One op that waits.

    Attributes:
        kind: which part of which formula.
        of: the Dual that the formula is about.
        value: constants of the formula so far.
        dtype, shape: of the result.
        run: runs the op, or a fused one that gives the same, and returns its result.
        mode: grad mode, and autocast's dtype or None, when it was called.
        held: tensors that must not change before it runs, with their versions.
    """

    __slots__ = ("dtype", "held", "kind", "mode", "of", "run", "shape", "value")

    def __init__(
        self, kind: str, of: Dual, value: Any, dtype: torch.dtype, shape: torch.Size, mode: Mode
    ) -> None:
        self.kind, self.of, self.value = kind, of, value
        self.dtype, self.shape, self.mode = dtype, shape, mode
        self.run: Callable[[], Any] = _nothing
        self.held: list[tuple[Tensor, int]] = []


def _nothing() -> None:
    raise AssertionError("a step without an op")


_local = threading.local()


def _waiting() -> list[weakref.ref[Dual]]:
    """The Duals of this thread that wait, or did."""
    if not hasattr(_local, "waiting"):
        _local.waiting = []
        _local.enabled = True
    return _local.waiting


@contextmanager
def as_written() -> Iterator[None]:
    """A region in which no formula is looked for: every op runs when and as it is called."""
    _waiting()
    before, _local.enabled = _local.enabled, False
    try:
        yield
    finally:
        _local.enabled = before


def mode_of(device: torch.device) -> Mode:
    """Grad mode and autocast's dtype, as they are now."""
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else None
    return torch.is_grad_enabled(), dtype


def step_of(x: Any, *kinds: str) -> Step | None:
    """The step that a Dual waits for, if it is one of these kinds and was called in this mode."""
    step = x.step if type(x) is Dual else None
    if step is None or step.kind not in kinds or step.mode != mode_of(device_of(x)):
        return None
    return step


def is_open(x: Any) -> bool:
    """Whether a formula may begin at x: a Dual of real numbers, outside of inference mode."""
    if type(x) is not Dual or torch.is_inference_mode_enabled() or not _enabled():
        return False
    return x.step is not None or not (x.stack.is_complex() or x.stack.is_inference())


def _enabled() -> bool:
    _waiting()
    return _local.enabled


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
    while x.step is not None:
        x = x.step.of
    return x.stack.device


def wait(
    kind: str,
    of: Dual,
    called: tuple[Any, tuple, dict] | Callable[[], Any],
    *,
    value: Any = None,
    dtype: torch.dtype | None = None,
    shape: torch.Size | None = None,
    uses: tuple[Tensor, ...] = (),
) -> Dual:
    """The Dual of an op that waits.

    Args:
        kind, of, value: see `Step`.
        called: (function, args, kwargs) of the op, or what runs in its place.
        dtype, shape: of the result; by default those of `of`.
        uses: plain tensors among its arguments.
    """
    device = device_of(of)
    mode = mode_of(device)
    step = Step(kind, of, value, dtype or dtype_of(of), shape or shape_of(of), mode)
    step.run = called if callable(called) else functools.partial(answer, *called)
    # A step that itself waits watches over its own.
    sources = uses if of.step is not None else (of.stack, *uses)
    step.held = [(source, source._version) for source in sources]
    smooth = _wants_grad(of) or any(each.requires_grad for each in uses)
    dual = Dual.waiting(step, step.shape, step.dtype, device, mode[0] and smooth)
    waiting = _waiting()
    if len(waiting) > 64:
        waiting[:] = [ref for ref in waiting if (found := ref()) is not None and found.step]
    waiting.append(weakref.ref(dual))
    return dual


def _wants_grad(x: Dual) -> bool:
    while x.step is not None:
        if any(source.requires_grad for source, _ in x.step.held):
            return True
        x = x.step.of
    return x.stack.requires_grad


def settle(dual: Dual) -> None:
    """Run the op that a Dual waits for."""
    step = dual.step
    check_held(step)
    with _mode(step.mode, dual):
        result = step.run()
        stack = result.stack
    assert stack.shape[1:] == step.shape, (step.kind, stack.shape, step.shape)
    assert stack.dtype == step.dtype, (step.kind, stack.dtype, step.dtype)
    dual.__dict__.update(result.__dict__)
    dual.step = None


@contextmanager
def _mode(mode: Mode, dual: Dual) -> Iterator[None]:
    device = device_of(dual)
    if mode == mode_of(device):
        yield
        return
    grad, autocast = mode
    with (
        torch.set_grad_enabled(grad),
        torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
    ):
        yield


def check_held(step: Step) -> None:
    """Raise if a tensor that a waiting op reads was written to in a way that nobody saw."""
    for source, version in step.held:
        if source._version != version:
            raise RuntimeError(
                f"stars_fast: a tensor of shape {list(source.shape)} was written in place, past the "
                "tensor with a tangent that shares its memory, before an op that reads it had run; "
                "clone it before the write, or run the block under stars_fast.dual.lazy.as_written()"
            )


def settle_all() -> None:
    """Run every op that waits in this thread, in the order in which they were called."""
    waiting = _waiting()
    found = [dual for ref in waiting if (dual := ref()) is not None]
    waiting.clear()
    for dual in found:
        if dual.step is not None:
            settle(dual)


_RECORDERS: dict[Any, list[Recorder]] = {}


def recorder(*names: str) -> Callable[[Recorder], Recorder]:
    """Decorator: this function is asked first what a call of one of `names` means. It returns a
    Dual, or None where the call is no part of a formula that it knows."""

    def register(function: Recorder) -> Recorder:
        for name in names:
            for target in objects_named(name):
                found = _RECORDERS.setdefault(target, [])
                if function not in found:
                    found.append(function)
        return function

    return register


# -- answers that wake nothing


@recorder("dtype")
def _dtype(func: Any, args: tuple, kwargs: dict) -> Any:
    return None if args[0].step is None else args[0].step.dtype


@recorder("shape")
def _shape(func: Any, args: tuple, kwargs: dict) -> Any:
    return None if args[0].step is None else args[0].step.shape


@recorder("dim", "ndim", "ndimension")
def _dim(func: Any, args: tuple, kwargs: dict) -> Any:
    return None if args[0].step is None else len(args[0].step.shape)


@recorder("size")
def _size(func: Any, args: tuple, kwargs: dict) -> Any:
    if args[0].step is None or len(args) != 1 or kwargs:
        return None
    return args[0].step.shape


@recorder("device")
def _device(func: Any, args: tuple, kwargs: dict) -> Any:
    return None if args[0].step is None else device_of(args[0])


# -- writes


def _writes(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call may write into its arguments, by its name and its flags."""
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    if name.startswith("__i") or name in ("__setitem__", "__set__"):
        return True
    return any(arg is True for arg in args) or bool(kwargs.get("inplace"))


def ask(func: Any, args: tuple, kwargs: dict) -> Any:
    """Answer a call that is part of a known formula; None for any other."""
    for each in _RECORDERS.get(func, ()):
        result = each(func, args, kwargs)
        if result is not None:
            return result
    if _waiting() and _writes(func, args, kwargs):
        settle_all()
    return None


set_recorder(ask, settle)
