"""Types of command-line options."""

import argparse


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
