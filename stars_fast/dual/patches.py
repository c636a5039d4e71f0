"""Changes to torch while a dual pass runs, put back when it ends; no class, module or
function of the user's is.

- `torch.autograd.Function.apply` looks for Duals first: a custom function does not answer
  `__torch_function__`, and would run on a Dual below autograd and lose its gradient.
- What prepares a region of `torch.utils.checkpoint` notes the pass that it is in, so that its
  recomputation, in backward, does what the pass did.
- Forward mode is on, also where a checkpoint around the pass or inference mode turned it off: where
  a Dual meets it off inside, it is in a custom function that did not come by here
  (`tensor._is_constant_here`).
- Compiled functions run eagerly: they would trace tensors, not pairs.
- Functions of TorchScript run op by op (`scripts`).
- Reentrant checkpoints run as the other kind: they would detach what they are given.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from stars_fast.dual.backward_checks import NoSecondDerivative
from stars_fast.dual.backward_twice import jvp_by_backward
from stars_fast.dual.forward_ad import jvp
from stars_fast.dual.registry import report
from stars_fast.dual.running import recognising, settle_all, state
from stars_fast.dual.scripts import call_script
from stars_fast.dual.tensor import Dual, primal_of

# Functions that hand their inputs on unchanged and act only when backward comes by.
_PASS_THROUGH = {
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction",
    "torch.nn.modules._functions.BackwardHookFunction",
    "torch.nn.parallel.distributed._DDPSink",
}
# Functions that only keep their inputs for later.
_KEEPERS = {"torch.utils.checkpoint._NoopSaveInputs"}


class _Change:
    """A change of torch that lasts while anyone is inside; regions of several threads share it.

    Args:
        make: makes the change and returns what puts back what was there.
    """

    def __init__(self, make: Callable[[], Callable[[], None]]) -> None:
        self._make = make
        self._undo: Callable[[], None] = lambda: None
        self._lock, self._depth = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._undo = self._make()
            self._depth += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._undo()


# -- custom autograd functions

# A classmethod in Python, since torch 2.14 one in C: both bind by `__get__`.
_unbound_apply = torch.autograd.Function.__dict__["apply"]


def _plain_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return _unbound_apply.__get__(None, cls)(*args, **kwargs)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    duals = Dual in map(type, (*args, *kwargs.values()))
    if cls is torch.utils.checkpoint.CheckpointFunction and (duals or state.running is not None):
        return _without_reentry(*args)  # also in a region on stacks, where no pass runs
    if not duals:
        return _unbound_apply.__get__(None, cls)(*args, **kwargs)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name in _KEEPERS:
        return _plain_apply(cls, *args, **kwargs)
    if name in _PASS_THROUGH:
        return _pass_through(cls, args)
    running = state.running
    if running is not None and torch.is_inference_mode_enabled() and not running.inference:
        settle_all()  # torch takes no derivatives of what is computed there
        args, kwargs = tree_map(primal_of, (args, kwargs))
        return _plain_apply(cls, *args, **kwargs)
    report(cls.__qualname__, "fallback")
    run = functools.partial(_plain_apply, cls)
    # `Function.jvp` of the base class only raises.
    if cls.jvp is not torch.autograd.Function.jvp:
        return jvp(run, name, args, kwargs, may_leave_out=True)
    try:
        return jvp_by_backward(run, name, args, kwargs)
    except NoSecondDerivative as error:
        raise RuntimeError(
            f"stars_fast: the custom autograd function {name} has no `jvp`, and its backward can't "
            f"stand for one: {error}; define a `jvp`, or use plain torch functions there"
        ) from error


def _pass_through(cls: Any, args: tuple) -> Any:
    outputs = _plain_apply(cls, *(arg.stack if type(arg) is Dual else arg for arg in args))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return tuple(
        Dual(out) if type(source) is Dual else out
        for source, out in zip(inputs, outputs, strict=True)
    )


def _without_reentry(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """`checkpoint(run, *args, use_reentrant=True)` by the kind of checkpoint that keeps hold of
    what goes in, closures too."""
    return torch.utils.checkpoint.checkpoint(
        run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )


def _change_functions() -> Callable[[], None]:
    global _unbound_apply
    _unbound_apply = before = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[method-assign,assignment]

    def undo() -> None:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]

    return undo


# -- checkpointed regions


def _recomputed_alike(generator: Callable[..., Any]) -> Callable[..., Any]:
    """Preparation of a checkpointed region. Of a pass: all that waits runs before it, and its
    recomputation, in backward, has the surroundings of the pass. Formulas are looked for, or not,
    as they were."""

    def prepare(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running, recognises = state.running, state.recognises
        if running is None and recognises:
            return generator(fn, *args, **kwargs)
        settle_all()

        def again(*args: Any, **kwargs: Any) -> Any:
            with recognising(recognises):
                if running is None:
                    return fn(*args, **kwargs)
                try:
                    with surroundings(), running:
                        return fn(*args, **kwargs)
                finally:
                    running.release()

        return generator(again, *args, **kwargs)

    return prepare


# What torch.utils.checkpoint prepares a region with, under the name that the running torch has.
_PREPARERS = [
    name.rpartition(".")[2]
    for name in (
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
    )
    if hasattr(torch.utils.checkpoint, name.rpartition(".")[2])
]


def _change_checkpoints() -> Callable[[], None]:
    before = {name: getattr(torch.utils.checkpoint, name) for name in _PREPARERS}
    for name, generator in before.items():
        setattr(torch.utils.checkpoint, name, _recomputed_alike(generator))

    def undo() -> None:
        for name, generator in before.items():
            setattr(torch.utils.checkpoint, name, generator)

    return undo


# -- compiled functions


def _change_stance() -> Callable[[], None]:
    stance: Any = torch.compiler.set_stance("force_eager")
    stance.__enter__()
    return lambda: stance.__exit__(None, None, None)


# -- functions of TorchScript

_run_script = torch.jit.ScriptFunction.__call__


def _call_script(script: Any, *args: Any, **kwargs: Any) -> Any:
    if state.running is None:
        return _run_script(script, *args, **kwargs)
    return call_script(_run_script, script, args, kwargs)


def _change_scripts() -> Callable[[], None]:
    global _run_script
    _run_script = before = torch.jit.ScriptFunction.__call__
    torch.jit.ScriptFunction.__call__ = _call_script  # type: ignore[method-assign,assignment]

    def undo() -> None:
        torch.jit.ScriptFunction.__call__ = before  # type: ignore[method-assign]

    return undo


_functions = _Change(_change_functions)
_stance = _Change(_change_stance)
_scripts = _Change(_change_scripts)
noted_checkpoints = _Change(_change_checkpoints)
"""The region in which checkpointing notes whether formulas are looked for, and which pass runs."""


@contextmanager
def surroundings() -> Iterator[None]:
    """The region of one dual pass; passes of several threads share what is changed."""
    on = forward_ad._set_fwd_grad_enabled
    with noted_checkpoints, _functions, _stance, _scripts, on(True):
        yield
