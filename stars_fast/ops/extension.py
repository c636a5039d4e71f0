"""The compiled extension of `csrc/`: found, checked and loaded once."""

from __future__ import annotations


def load() -> bool:
    """Whether the extension is there and loaded."""
    return False
