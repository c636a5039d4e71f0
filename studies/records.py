"""Records of finished runs, a line of JSON each, in a file that can be handed on and committed.

A study takes the runs that the file holds as done, wherever they were trained, and adds to it those
that it trains. A run is known by a hash of all that decides what comes out: its fields that are not
at their defaults, and how it is judged. So a new field with a default leaves old records valid, and
a new definition does not find them.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stars_fast.base import tree
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import read_text
from stars_fast.base.unique_keys import parse_json
from studies.definition import StudyRun

CHECKPOINTS = frozenset({"train.save_every", "train.keep"})
"""Fields that say which checkpoints there are."""

KEPT_DIGITS = 5
"""Significant digits of the numbers in a record."""


def settings_hash(run: StudyRun, may_differ: frozenset[str]) -> str:
    """The first 16 hex digits of the SHA-256 of what decides a run's figures.

    `may_differ` are the fields that don't. Which checkpoints there are does, where several are
    judged.
    """
    aside = may_differ - CHECKPOINTS
    known = tree.leaves(type(run.config))
    fields = {
        name: value
        for name, value in tree.flat_mapping(tree.to_dict(run.config)).items()
        if name not in aside and value != _plain(known[name].default)
    }
    text = json.dumps([fields, run.judged._asdict()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Records:
    """The records in a file, by hash; of no file there are none, and none are kept.

    Raises:
        ConfigError: a line of the file is not a record.
    """

    def __init__(self, path: Path | None, may_differ: frozenset[str]) -> None:
        self.path = path
        self.may_differ = may_differ
        self._known: dict[str, dict[str, Any]] = {}
        lines = read_text(path).splitlines() if path is not None and path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                record = parse_json(line)
                self._known[record.pop("settings")] = record
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"{path}, line {number}: expected a record of a run, got {line[:40]!r}"
                ) from error

    def of(self, run: StudyRun) -> dict[str, Any] | None:
        """The entry of a run, None if it has no record."""
        return self._known.get(settings_hash(run, self.may_differ))

    def add(self, run: StudyRun, entry: Mapping[str, Any]) -> None:
        """Keep what came out of a run, at the end of the file, unless it is there."""
        if self.path is None or self.of(run) is not None:
            return
        known = settings_hash(run, self.may_differ)
        record = {name: _short(value) for name, value in entry.items()}
        self._known[known] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"settings": known, **record}) + "\n"
        with self.path.open("ab+") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0:
                line = line if file.read(1) == b"\n" else "\n" + line  # an editor may leave none
            file.write(line.encode())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> Any:
    """A figure, or a curve of them, with `KEPT_DIGITS` digits."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return float(f"{value:.{KEPT_DIGITS}g}") if isinstance(value, float) else value
