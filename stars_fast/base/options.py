"""Command-line options: their parser and their types."""

import argparse
from typing import Any

_PATHS = ("DIR", "FILE", "FOLDER", "RUN", "SOURCE")
"""Metavars of what is on the disk."""


class Parser(argparse.ArgumentParser):
    """A parser that refuses an option which comes twice, instead of forgetting the first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)


class _StoreOnce(argparse.Action):
    """Keep the value of an option, once for each namespace."""

    filled: argparse.Namespace | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.metavar in _PATHS:  # how shtab is told that a shell completes files here
            self.complete = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if option_string is not None and self.filled is namespace:
            raise argparse.ArgumentError(self, f"given twice, the second time with {values!r}")
        self.filled = namespace
        setattr(namespace, self.dest, values)


def positive(text: str) -> int:
    """A positive integer.

    Raises:
        ArgumentTypeError: the text is anything else.
    """
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def number_list(text: str) -> list[int]:
    """Positive integers between commas, at least one; what comes again counts once.

    Raises:
        ArgumentTypeError: the text is anything else.
    """
    found = list(dict.fromkeys(positive(part) for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError("expected numbers like 1,2,4")
    return found
