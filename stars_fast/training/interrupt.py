"""Ctrl-C and SIGTERM as a wish that the loop grants after the step it is in."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, the first SIGINT or SIGTERM is noted in `received`; a second one acts at once.

    Outside the main thread, where Python gives signals to nobody else, nothing is caught.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def __exit__(self, *_: object) -> None:
        self._restore()
