"""Metrics of a run: summed on the device between log steps, written as one JSON line each."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from stars_fast.training.durable import write_text
from stars_fast.training.step import Plan, StepStats


class Meter:
    """Sums of the steps since the last line, on the device; one transfer a line.

    Steps that were not finite count as skipped and enter no mean.
    """

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(2, device=device, dtype=torch.float64)  # tokens, skipped
        self.streak = torch.zeros((), device=device, dtype=torch.int64)
        self._clear()

    def _clear(self) -> None:
        # finite steps, finite steps with a penalty; loss, penalty, grad_norm over those; tokens
        self.sums = torch.zeros(6, device=self.totals.device, dtype=torch.float64)
        self.turns: list[int] = []
        self.since = time.perf_counter()

    def add(self, stats: StepStats, plan: Plan) -> None:
        """Add one step; nothing waits for the device."""
        one = stats.finite.double()
        penalised = one if plan.weight else torch.zeros_like(one)
        values = torch.stack([stats.loss, stats.penalty, stats.grad_norm]).double()
        values = torch.where(stats.finite, values, 0.0)
        tokens = stats.tokens.double()
        self.sums += torch.cat([torch.stack([one, penalised]), values, tokens[None]])
        self.totals += torch.stack([tokens, 1.0 - one])
        self.streak = torch.where(stats.finite, 0, self.streak + 1)
        self.turns += plan.turns

    def line(self, plan: Plan) -> tuple[dict[str, Any], int]:
        """The metrics since the last line, up to the step of `plan`, and non-finite steps in a row.

        Means over the finite steps; None where there is none. Waits for the device.
        """
        read = torch.cat([self.sums, self.totals, self.streak.double()[None]]).tolist()
        steps, penalised, loss, penalty, norm, tokens, all_tokens, skipped, streak = read
        row = {
            "step": plan.step + 1,
            "loss": loss / steps if steps else None,
            "penalty": penalty / penalised if penalised else None,
            "lambda": plan.weight,
            "depth": sum(self.turns) / len(self.turns),
            "lr": plan.lr,
            "grad_norm": norm / steps if steps else None,
            "tokens_per_second": tokens / (time.perf_counter() - self.since),
            "tokens": int(all_tokens),
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
            "totals": self.totals.cpu(),
            "turns": list(self.turns),
            "seconds": time.perf_counter() - self.since,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the row of non-finite steps starts anew."""
        self.sums.copy_(state["sums"])
        self.totals.copy_(state["totals"])
        self.turns = list(state["turns"])
        self.since = time.perf_counter() - state["seconds"]


class MetricsLog:
    """metrics.jsonl, one line a log step, flushed; TensorBoard events beside it if asked.

    On a resumed run lines after `step` are dropped first: those steps are run again.
    """

    def __init__(self, path: Path, step: int, tensorboard: Path | None = None) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= step] if path.exists() else []
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")
        self._events = _tensorboard(tensorboard, step) if tensorboard else None

    @property
    def has_tensorboard(self) -> bool:
        """Whether TensorBoard events are written."""
        return self._events is not None

    def write(self, row: dict[str, Any]) -> None:
        """Write one line."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                    self._events.add_scalar(name, value, row["step"])
            for turns, accuracy in row.get("accuracy", {}).items():
                self._events.add_scalar(f"accuracy/{turns}", accuracy, row["step"])

    def sync(self) -> None:
        """Flush the lines to the disk."""
        os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Close the file and the events."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _tensorboard(folder: Path, step: int) -> Any:
    """A writer of TensorBoard events, None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
