"""What a dual pass needs around it: compiled functions run eagerly, custom autograd functions are
given their tangents.

A `torch.autograd.Function` does not answer `__torch_function__`: left alone it would run on a Dual
below autograd and lose the gradient. While a pass runs, `Function.apply` looks for Duals first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from stars_fast.dual.forward_ad import jvp
from stars_fast.dual.pass_mode import running_pass
from stars_fast.dual.recognition.steps import settle_all
from stars_fast.dual.registry import report
from stars_fast.dual.tensor import Dual

# Functions that hand their inputs on unchanged and act only when backward comes by.
_PASS_THROUGH = {
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction",
    "torch.nn.modules._functions.BackwardHookFunction",
    "torch.nn.parallel.distributed._DDPSink",
}
# Functions that only keep their inputs for later.
_KEEPERS = {"torch.utils.checkpoint._NoopSaveInputs"}

# A classmethod in Python, since torch 2.14 one in C: both bind by `__get__`.
_unbound_apply = torch.autograd.Function.__dict__["apply"]
_lock = threading.Lock()
_depth = 0
_stance: Any = None


def _plain_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return _unbound_apply.__get__(None, cls)(*args, **kwargs)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(type(arg) is Dual for arg in args):
        return _plain_apply(cls, *args, **kwargs)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name in _KEEPERS:
        return _plain_apply(cls, *args, **kwargs)
    if name in _PASS_THROUGH:
        return _pass_through(cls, args)
    if name == "torch.utils.checkpoint.CheckpointFunction":
        raise RuntimeError(
            "stars_fast: reentrant checkpointing detaches its inputs and would lose the tangent; "
            "use checkpoint(..., use_reentrant=False)"
        )
    # `Function.jvp` of the base class only raises.
    if cls.jvp is torch.autograd.Function.jvp:
        raise RuntimeError(
            f"stars_fast: the custom autograd function {name} has no `jvp`, so its tangent can't "
            "be computed; define one, or use plain torch functions there"
        )
    report(cls.__qualname__, "fallback")
    return jvp(lambda *inputs: _plain_apply(cls, *inputs), name, args, kwargs)


def _pass_through(cls: Any, args: tuple) -> Any:
    outputs = _plain_apply(cls, *(arg.stack if type(arg) is Dual else arg for arg in args))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return tuple(
        Dual(out) if type(source) is Dual else out
        for source, out in zip(inputs, outputs, strict=True)
    )


def _recomputed_in_scope(generator: Callable[..., Any]) -> Callable[..., Any]:
    """What prepares a checkpointed region, for a region of a pass: what waits runs before it, and
    its recomputation, in backward, has the surroundings of the pass."""

    def prepare(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running = running_pass()
        if running is None:
            return generator(fn, *args, **kwargs)
        settle_all()

        def again(*args: Any, **kwargs: Any) -> Any:
            with dual_scope(), running:
                return fn(*args, **kwargs)

        return generator(again, *args, **kwargs)

    return prepare


# What torch.utils.checkpoint prepares a region with, under the name that the running torch has.
_PREPARERS = {
    name.rpartition(".")[2]: getattr(torch.utils.checkpoint, name.rpartition(".")[2])
    for name in (
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
    )
    if hasattr(torch.utils.checkpoint, name.rpartition(".")[2])
}


@contextmanager
def dual_scope() -> Iterator[None]:
    """The surroundings of one dual pass; passes of several threads share them."""
    global _depth, _stance
    with _lock:
        if _depth == 0:
            for name, generator in _PREPARERS.items():
                setattr(torch.utils.checkpoint, name, _recomputed_in_scope(generator))
            torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[method-assign,assignment]
            # A compiled function traces tensors, not pairs.
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _stance.__exit__(None, None, None)
                torch.autograd.Function.apply = _unbound_apply  # type: ignore[method-assign]
                for name, generator in _PREPARERS.items():
                    setattr(torch.utils.checkpoint, name, generator)
