"""Ctrl-C and SIGTERM as a wish that the loop grants after the step it is in."""

import signal
import threading
import time
from types import FrameType
from typing import Any

IMPATIENT = 2.0
"""Seconds from which a further signal acts at once. Until then it is the same wish come by another
way: launchers and schedulers pass on what the process has received itself."""


class Interrupts:
    """While entered, the first SIGINT or SIGTERM is noted in `received`; a later one acts at once.

    Outside the main thread, where Python handles no signals, nothing is caught.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._since = number, now
        elif now - self._since >= IMPATIENT:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def __exit__(self, *_: object) -> None:
        self._restore()
