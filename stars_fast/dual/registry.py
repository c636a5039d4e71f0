"""Which rule answers which torch function.

A rule is an ordinary function with the signature of the torch function it stands for. `@rule`
(`rule.py`) registers it for every object of that name that reaches `__torch_function__`:
`torch.add`, `Tensor.add`, `Tensor.__add__`, `F.silu`, ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

OWNERS = (torch, torch.Tensor, F, torch._C._nn, torch.special)


@dataclass(frozen=True)
class Rule:
    """`kind` is what `explain` prints: fused, stacked, product, primal, in-place or fallback. With
    `real` the rule holds for real numbers alone."""

    name: str
    kind: str
    handler: Callable[..., Any]
    real: bool = False

    def accepts(self, args: tuple, kwargs: dict) -> bool:
        """Whether the handler can be called like this."""
        try:
            inspect.signature(self.handler).bind(*args, **kwargs)
        except TypeError:
            return False
        return True


RULES: dict[Any, Rule] = {}
"""torch function -> rule."""

LIBRARY_RULES: dict[str, Callable[..., Any]] = {}
"""Name of an op of `torch.library` -> its rule: ops that other packages define when imported."""

Recorder = Callable[[Any, tuple, dict], Any]

RECORDERS: dict[Any, Recorder] = {}
"""torch function -> what is asked before its rule, whether the call is part of a known formula."""

Answer = Callable[[Any, tuple, dict], Any]

_fallback: Answer


def fallback(handler: Answer) -> Answer:
    """Decorator: this function answers the ops that have no rule."""
    global _fallback
    _fallback = handler
    return handler


def answer_without_rule(func: Any, args: tuple, kwargs: dict) -> Any:
    """Answer an op that has no rule."""
    return _fallback(func, args, kwargs)


_observers: list[Callable[[str, str], None]] = []


def observe(observer: Callable[[str, str], None]) -> Callable[[], None]:
    """Call `observer(name, kind)` for each op that a Dual meets; returns what stops it."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def observed() -> bool:
    """Whether anyone wants to know which ops run."""
    return bool(_observers)


def report(name: str, kind: str) -> None:
    """Tell the observers that an op was answered."""
    for observer in _observers:
        observer(name, kind)


def objects_named(name: str, owners: Sequence[Any] = OWNERS) -> Iterator[Any]:
    """Every function object of this name that torch may hand to `__torch_function__`."""
    for owner in owners:
        found = getattr(owner, name, None)
        if found is None:
            continue
        if not callable(found) and hasattr(found, "__get__"):
            found = found.__get__
        yield found


def add_rule(
    name: str,
    kind: str,
    handler: Callable[..., Any],
    *names: str,
    owners: Sequence[Any] = OWNERS,
    real: bool = False,
) -> None:
    """Register `handler` under `name` and under each of `names`; with `real`, as all fused rules,
    for real numbers alone."""
    for each in (name, *names):
        for target in objects_named(each, owners):
            RULES[target] = Rule(name, kind, handler, real or kind == "fused")


_writers: dict[Any, bool] = {}


def may_write(func: Any) -> bool:
    """Whether a function writes into its first argument, by its name."""
    writes = _writers.get(func)
    if writes is None:
        name = getattr(func, "__name__", "")
        writes = name.startswith("__i") or name in ("__setitem__", "__set__")
        writes = writes or (name.endswith("_") and not name.endswith("__"))
        _writers[func] = writes
    return writes
