"""Names for `explain`: which module, or which rotary function, a fused op stands for as a whole.

Fused ops are found by what is called, not by who calls. While `explain` runs, hooks of torch look
at what goes into and comes out of every module: one whose output is a fused op of its input lends
it the name of its class.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from stars_fast.dual.tensor import Dual, answer
from stars_fast.ops.pointwise import DERIVATIVES

Rename = Callable[[str, str, int], None]
"""rename(old, new, n): n calls of the fused op `old` are one call of `new`."""


class Names:
    """The names of one pass.

    Attributes:
        alias: the name of what runs now, where it is known beforehand.
    """

    def __init__(self, rename: Rename) -> None:
        self.rename = rename
        self.alias: str | None = None
        self._calls: dict[nn.Module, tuple[Any, Any]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The region in which modules and functions are looked at."""
        hook = register_module_forward_hook(self._unseen, with_kwargs=True)
        before = sys.getprofile()
        sys.setprofile(self._function)
        try:
            yield
        finally:
            sys.setprofile(before)
            hook.remove()
            # torch 2.13 forgets this one, and torch.compile would warn of a hook that is gone.
            left = torch.nn.modules.module._global_forward_hooks_with_kwargs
            left.pop(hook.id, None)
            self._calls.clear()

    def _unseen(self, *call: Any) -> None:
        # What is compared here is no op of the block.
        with torch._C.DisableTorchFunction():
            self._module(*call)

    def _module(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        children = [self._calls.pop(child, None) for child in module.children()]
        given = next(iter((*args, *kwargs.values())), None)
        if type(given) is not Dual or type(output) is not Dual:
            return
        self._calls[module] = given, output
        name = type(module).__name__
        if type(module).__module__.startswith("torch."):
            return
        if output.step is not None:
            self._later(module, name, given, output.step)
            return
        op, parts = _made(output)
        whole = (op == "rms_norm" and _is_own(parts[1], module)) or op in DERIVATIVES
        if whole and _is(parts[0], given):
            self.rename(op, name, 1)
        else:
            self._gated(name, given, output, [call for call in children if call])

    def _later(self, module: nn.Module, name: str, given: Dual, step: Any) -> None:
        """A module whose result waits: it is named when it runs."""
        known = step.kind == "activation" or (
            step.kind == "norm" and _is_own(step.value[1], module)
        )
        if known and _is(step.of, given):
            step.called = functools.partial(self._run_as, name, step.called)

    def _run_as(self, name: str, called: Any) -> Any:
        self.alias = name
        try:
            return answer(*called) if type(called) is tuple else called()
        finally:
            self.alias = None

    def _gated(self, name: str, given: Dual, output: Dual, calls: list[tuple[Dual, Dual]]) -> None:
        """down(f(gate(x)) * up(x)): gate and up take the input, down gives the output."""
        for hidden, result in calls:
            op, parts = _made(hidden)
            if not op.startswith("gated:") or not _is(result, output):
                continue
            sides = [out for inner, out in calls if _is(inner, given)]
            # By value: x * 1.0 is x.
            if all(any(torch.equal(part.stack, side.stack) for side in sides) for part in parts):
                self.rename(op, f"{name}:{op.removeprefix('gated:')}*up", 1)

    def _function(self, frame: FrameType, event: str, result: Any) -> None:
        """Called by Python when a function is left."""
        if event != "return" or type(result) is not tuple or not _is_rotary_name(frame):
            return
        if all(type(each) is Dual and _made(each)[0] == "rotary" for each in result):
            self.rename("rotary", frame.f_code.co_name, len(result))


def only_looks(hook: Any) -> bool:
    """Whether a forward hook is that of `Names`, which changes nothing and misses nothing where
    modules are not called."""
    return getattr(hook, "__func__", None) is Names._unseen


def _is_rotary_name(frame: FrameType) -> bool:
    return "rot" in frame.f_code.co_name and frame.f_code.co_name.startswith("apply")


def _made(x: Dual) -> tuple[str, tuple]:
    """The fused op that x is the result of, and its inputs."""
    return getattr(x.stack, "made", ("", ())) if x.step is None else ("", ())


def _is(a: Dual, b: Dual) -> bool:
    """Whether both are the same tensor."""
    return a is b or (a.step is None and b.step is None and a.stack is b.stack)


def _is_own(weight: Tensor | None, module: nn.Module) -> bool:
    """Whether a norm's weight is that of the module, or one more than it."""
    if weight is None:
        return not module._parameters
    return any(
        own is not None
        and own.shape == weight.shape
        and (torch.equal(weight, own.to(weight.dtype)) or torch.equal(weight, 1 + own.to(weight)))
        for own in module._parameters.values()
    )
