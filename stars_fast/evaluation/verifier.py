"""Timeouts of math-verify, told from wrong answers.

math-verify gives a comparison and a parse five seconds each (by SIGALRM, hence in the main thread
alone). Where they run out it answers False, or that it found nothing, as for a wrong answer, and
tells so by a log record alone; tasks of lm-eval that call it do not see the difference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LOGGERS = ("math_verify.grader", "math_verify.parser")
TIMEOUT = "Timeout during"
"""How its records of a timeout begin."""

TIMED_OUT = "verifier_timeout"
"""The name among a sample's metrics."""


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard = False

    def emit(self, record: logging.LogRecord) -> None:
        self.heard |= record.getMessage().startswith(TIMEOUT)


@contextmanager
def timeouts_told(task: Any) -> Iterator[None]:
    """Let a task of lm-eval tell, as the metric `TIMED_OUT` of each sample, whether the verifier
    ran out of time before it found the sample right. Such a sample has no other metric, and so
    no part in the scores."""
    process, aggregation = task.process_results, task.aggregation

    def process_results(doc: Any, results: Any) -> dict[str, Any]:
        with _listening() as listener:
            metrics = process(doc, results)
        if listener.heard and not _right(metrics):
            return {TIMED_OUT: 1}
        return {**metrics, TIMED_OUT: 0}

    task.process_results = process_results
    task.aggregation = lambda: {**aggregation(), TIMED_OUT: sum}
    try:
        yield
    finally:
        del task.process_results, task.aggregation


def _right(metrics: Mapping[str, Any]) -> bool:
    """Whether the verifier found a sample right."""
    verdicts = [metrics["math_verify"]] if "math_verify" in metrics else metrics.values()
    return any(isinstance(verdict, (int, float)) and verdict > 0 for verdict in verdicts)


@contextmanager
def _listening() -> Iterator[_Listener]:
    """Hear the verifier's warnings, and keep them from the terminal."""
    listener = _Listener()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(listener)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
    try:
        yield listener
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(listener)
            logger.setLevel(level)
            logger.propagate = propagate
