"""The state of the dual pass that runs in this thread: the pass itself, and the ops that wait."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stars_fast.dual.registry import may_write


class _State(threading.local):
    """Attributes:
    running: the pass (`pass_mode.Pass`); None outside of one.
    recognises: whether formulas are looked for.
    waiting: Duals that wait for their op (`recognition.steps`), or did.
    limit: how many of them are kept before those that have run are dropped.
    """

    def __init__(self) -> None:
        self.running: Any = None
        self.recognises = True
        self.waiting: list[weakref.ref[Any]] = []
        self.limit = 64


state = _State()


def running_pass() -> Any:
    """The pass that runs in this thread; None outside of one."""
    return state.running


@contextmanager
def recognising(enabled: bool) -> Iterator[None]:
    """A region of this thread in which formulas are looked for, or not."""
    before, state.recognises = state.recognises, enabled
    try:
        yield
    finally:
        state.recognises = before


def add_waiting(dual: Any) -> None:
    """Keep in mind a Dual whose op waits."""
    waiting = state.waiting
    if len(waiting) > state.limit:
        waiting[:] = [ref for ref in waiting if (found := ref()) is not None and found.step]
        state.limit = max(64, 2 * len(waiting))
    waiting.append(weakref.ref(dual))


def settle_all() -> None:
    """Run every op that waits in this thread, in the order in which they were called."""
    waiting = state.waiting
    found = [dual for ref in waiting if (dual := ref()) is not None]
    waiting.clear()
    for dual in found:
        if dual.step is not None:
            dual.step.settle(dual)


def settle_before(func: Any, args: tuple, kwargs: dict) -> None:
    """Run every op that waits, if this call may write into what one of them reads."""
    if may_write(func) or (kwargs and kwargs.get("inplace")):
        settle_all()
        return
    for arg in args:
        if arg is True:  # a flag such as inplace=True
            settle_all()
            return


def forget_waiting() -> None:
    """Drop what waits: no op of a pass that is over is asked for again."""
    state.waiting.clear()
