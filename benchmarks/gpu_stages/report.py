"""Findings of the stages, on disk after each entry."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import reason


class Report:
    """The results of one stage, added to the file of those before it.

    path: the file; it is written whole after each entry, so that a stage that is killed leaves all
        it had.
    seconds: how long the stage may go on; afterwards what is left is skipped.
    strict: whether something that is skipped is a failure, as where things are checked.
    """

    def __init__(self, path: Path, stage: str, seconds: float, strict: bool = False) -> None:
        self.path, self.stage, self.strict = path, stage, strict
        self.end = time.monotonic() + seconds
        self.data: dict[str, Any] = {"stages": [], "failures": [], "skipped": []}
        if path.exists():
            self.data = json.loads(path.read_text())

    @property
    def left(self) -> float:
        """Seconds, never fewer than 0."""
        return max(self.end - time.monotonic(), 0.0)

    def add(self, section: str, entry: Mapping[str, Any]) -> None:
        """An entry, which is on disk when this returns."""
        self.data.setdefault(section, []).append({"stage": self.stage, **entry})
        print(section, json.dumps(entry), flush=True)
        self.write()

    def fail(self, why: str) -> None:
        """Something is wrong or did not run; the command will say so."""
        self.add("failures", {"why": why})

    def skip(self, what: str, why: str = "out of time") -> None:
        """Something was left out."""
        self.add("skipped", {"what": what, "why": why})
        if self.strict:
            self.fail(f"{what}: {why}")

    def write(self) -> None:
        """Write the file anew and put it in the place of the old one."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        part.replace(self.path)

    def attempt(self, name: str, run: Callable[[], None], needs: float = 0.0) -> None:
        """Run one thing if `needs` seconds are left; its failure is kept and the next one runs."""
        if self.left <= needs:
            self.skip(name)
            return
        try:
            run()
        except Exception as error:  # whatever it is, the rest must still be measured
            traceback.print_exc()
            self.fail(f"{name}: {reason(error)}")
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
