"""The decorator of rules, with the in-place forms that follow from a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stars_fast.dual.in_place import in_place_form
from stars_fast.dual.registry import OWNERS, add_rule

Handler = TypeVar("Handler", bound=Callable[..., Any])


def rule(
    *names: str, kind: str, inplace: bool = False, owners: Sequence[Any] = OWNERS
) -> Callable[[Handler], Handler]:
    """Decorator: this function is the rule for `names`; with `inplace` also for their in-place
    forms (`name_`, and `__iname__` for `__name__`). `owners` narrows where the names are looked up,
    for names that mean different things in different places."""

    def register(handler: Handler) -> Handler:
        add_rule(names[0], kind, handler, *names[1:], owners=owners)
        for name in names if inplace else ():
            if name.startswith("__r"):
                continue
            written = f"__i{name[2:]}" if name.startswith("__") else f"{name}_"
            add_rule(written, "in-place", in_place_form(written, handler))
        return handler

    return register
