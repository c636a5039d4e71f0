"""A run with some of its settings otherwise, to plan what a user could change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

Changes = Mapping[str, Mapping[str, Any]]
"""Fields by section."""


def otherwise(config: Any, changes: Changes) -> Any | None:
    """The run with these fields otherwise; None where its other settings exclude them."""
    try:
        sections = {
            name: replace(getattr(config, name), **fields) for name, fields in changes.items()
        }
        return replace(config, **sections)
    except ValueError:
        return None
