"""Which rule answers which torch function.

A rule is an ordinary function with the signature of the torch function it stands for. `@rule`
registers it for every object of that name that reaches `__torch_function__`: `torch.add`,
`Tensor.add`, `Tensor.__add__`, `F.silu`, ... and, with `inplace=True`, for the in-place forms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

Handler = TypeVar("Handler", bound=Callable[..., Any])

_OWNERS = (torch, torch.Tensor, F, torch._C._nn, torch.special)


@dataclass(frozen=True)
class Rule:
    """`kind` is what `explain` prints: fused, stacked, product, primal, in-place or fallback."""

    name: str
    kind: str
    handler: Callable[..., Any]

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


def objects_named(name: str, owners: Sequence[Any] = _OWNERS) -> Iterator[Any]:
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
    owners: Sequence[Any] = _OWNERS,
) -> None:
    """Register `handler` under `name` and under each of `names`."""
    for each in (name, *names):
        for target in objects_named(each, owners):
            RULES[target] = Rule(name, kind, handler)


def rule(
    *names: str, kind: str, inplace: bool = False, owners: Sequence[Any] = _OWNERS
) -> Callable[[Handler], Handler]:
    """Decorator: this function is the rule for `names`; with `inplace` also for their in-place
    forms (`name_`, and `__iname__` for `__name__`). `owners` narrows where the names are looked up,
    for names that mean different things in different places."""

    def register(handler: Handler) -> Handler:
        add_rule(names[0], kind, handler, *names[1:], owners=owners)
        if inplace:
            from stars_fast.dual.in_place import inplace_form

            for name in names:
                if name.startswith("__"):
                    if not name.startswith("__r"):
                        other = f"__i{name[2:]}"
                        add_rule(other, "in-place", inplace_form(other, handler))
                else:
                    add_rule(f"{name}_", "in-place", inplace_form(f"{name}_", handler))
        return handler

    return register
