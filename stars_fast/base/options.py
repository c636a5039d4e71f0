"""Command-line options: their parser and their types."""

import argparse
import difflib
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn

_PATHS = ("DIR", "FILE", "FOLDER", "RUN", "SOURCE")
"""Metavars of what is on the disk."""


class Parser(argparse.ArgumentParser):
    """A parser that refuses an option which comes twice, instead of forgetting the first, and names
    the nearest option or choice for one that it does not know."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with 2."""
        known, meant = list(self._option_string_actions), ""
        if found := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            meant = found[1]
        elif found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            meant, known = found[1], re.findall(r"[\w.-]+", found[2])
        near = difflib.get_close_matches(meant, known, n=1)
        super().error(message + (f"; did you mean {near[0]}?" if near else ""))


class _StoreOnce(argparse.Action):
    """Keep the value of an option, once for each namespace."""

    filled: argparse.Namespace | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.metavar in _PATHS:
            self.type = _at_home(options.get("type") or str)
            # How shtab is told that a shell completes files here
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


def _at_home(type: Callable[[str], Any]) -> Callable[[str], Any]:
    """`type` of a path whose ~ is the home folder: of --out=~/run a shell leaves it as it is."""
    return lambda text: type(os.path.expanduser(text))


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
