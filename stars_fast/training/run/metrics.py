"""Metrics of a run: summed on the device between log steps, written as one JSON line each."""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from stars_fast.base.files import cant_write, write_text
from stars_fast.training.plan.cards import card_of_device
from stars_fast.training.run.trackers import Tracker
from stars_fast.training.step.train_step import StepPlan, StepStats


class Meter:
    """Sums of the steps since the last line, on the device; one transfer a line.

    Steps that were not finite count as skipped and enter no mean. `peak` is what the device can do,
    in floating-point operations a second, None if that is not known.
    """

    def __init__(self, device: torch.device, peak: float | None = None) -> None:
        self.peak = peak
        self.tokens = 0
        self.skipped = torch.zeros((), device=device, dtype=torch.float64)
        self.streak = torch.zeros((), device=device, dtype=torch.float64)
        self._clear()

    def _clear(self) -> None:
        # finite steps, finite steps with a penalty; loss, penalty, grad_norm over those
        self.sums = torch.zeros(5, device=self.skipped.device, dtype=torch.float64)
        self.turns: list[int] = []
        self.since_tokens = 0
        self.flops = 0.0
        self.since = time.perf_counter()

    def add(self, stats: StepStats, plan: StepPlan, flops: float = 0.0) -> None:
        """Add one step, which took so many floating-point operations here; nothing waits for the
        device."""
        one = stats.finite.double()
        penalised = one if plan.weight else torch.zeros_like(one)
        values = torch.stack([stats.loss, stats.penalty, stats.grad_norm]).double()
        values = torch.where(stats.finite, values, 0.0)
        self.sums += torch.cat([torch.stack([one, penalised]), values])
        self.skipped += 1.0 - one
        self.streak = torch.where(stats.finite, 0.0, self.streak + 1.0)
        self.tokens += stats.tokens
        self.since_tokens += stats.tokens
        self.flops += flops
        self.turns += plan.turns

    def line(self, plan: StepPlan) -> tuple[dict[str, Any], int]:
        """The metrics since the last line, up to the step of `plan`, and non-finite steps in a row.

        Means over the finite steps; None where there is none. Waits for the device.
        """
        read = torch.cat([self.sums, self.skipped[None], self.streak[None]]).tolist()
        steps, penalised, loss, penalty, norm, skipped, streak = read
        seconds = time.perf_counter() - self.since
        row = {
            "step": plan.step + 1,
            "loss": loss / steps if steps else None,
            "penalty": penalty / penalised if penalised else None,
            "lambda": plan.weight,
            "depth": sum(self.turns) / len(self.turns),
            "lr": plan.lr,
            "grad_norm": norm / steps if steps else None,
            "tokens_per_second": self.since_tokens / seconds,
            "mfu": self.flops / seconds / self.peak if self.peak else None,
            "memory_gib": peak_memory(self.skipped.device) / 2**30,
            "tokens": self.tokens,
            "skipped": int(skipped),
        }
        self._clear()
        return row, int(streak)

    def restart_clock(self) -> None:
        """Leave the time since the last line, which has no steps yet, out of the throughput."""
        self.since = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Everything between two lines, for the checkpoint. Waits for the device."""
        return {
            "sums": self.sums.cpu(),
            "skipped": self.skipped.cpu(),
            "tokens": self.tokens,
            "turns": list(self.turns),
            "since_tokens": self.since_tokens,
            "flops": self.flops,
            "seconds": time.perf_counter() - self.since,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the row of non-finite steps starts anew."""
        self.sums.copy_(state["sums"])
        self.skipped.copy_(state["skipped"])
        self.tokens = state["tokens"]
        self.turns = list(state["turns"])
        self.since_tokens = state["since_tokens"]
        self.flops = state["flops"]
        self.since = time.perf_counter() - state["seconds"]


class MetricsLog:
    """metrics.jsonl, one line a log step, and the trackers that were asked for.

    On a resumed run lines after `step` are dropped first: those steps are run again. Lines that a
    full disk does not take are kept and written with the next; a tracker that can't write is
    dropped. Both are told to `say`.
    """

    def __init__(
        self,
        path: Path,
        step: int,
        trackers: Sequence[Tracker] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= step] if path.exists() else []
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._lock = threading.Lock()  # a save flushes the lines in its thread
        self._trackers = list(trackers)
        self._say = say

    def write(self, row: dict[str, Any]) -> None:
        """Write one line."""
        with self._lock:
            told = bool(self._unwritten)
            self._unwritten += (json.dumps(row) + "\n").encode()
            try:
                self._drain()
            except OSError as error:
                if not told:
                    self._say(
                        f"warning: {self._path} can't be written to: "
                        f"{cant_write(self._path, error)}. Its lines are kept until it can"
                    )
            self._tell(lambda tracker: tracker.log(row, row["step"]))

    def sync(self) -> None:
        """Flush the lines to the disk.

        Raises:
            OSError: metrics.jsonl can't be written to.
        """
        with self._lock:
            self._drain()
            os.fsync(self._file.fileno())
            self._tell(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Close the file and the trackers."""
        with self._lock:
            with suppress(OSError):  # which has been told
                self._drain()
            self._file.close()
            self._tell(lambda tracker: tracker.close())

    def _drain(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                what(tracker)
            except Exception as error:  # a service that fails is no reason to end a run
                self._trackers.remove(tracker)
                name = type(tracker).__name__.strip("_")
                why = f"{type(error).__name__}: {error}"
                if isinstance(error, OSError):
                    why = cant_write(self._path, error)
                self._say(
                    f"warning: {name} can't write: {why}. It is dropped until the run is resumed; "
                    "metrics.jsonl goes on"
                )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def peak_memory(device: torch.device) -> int:
    """Bytes that this process held at most: on the GPU in tensors, on the CPU in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak operations a second of `device` in bf16; None if not known or not computing so."""
    if device.type != "cuda" or precision == "float32":
        return None
    card = card_of_device(torch.cuda.get_device_name(device))
    return None if card is None else card.bf16
