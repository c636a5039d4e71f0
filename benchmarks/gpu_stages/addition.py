"""The paper's addition run, as many of its 10,000 steps as fit; accuracy by turns."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.report import Report
from stars_fast.training.config import load_config
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.trainer import train

ALL = 10_000
EVALUATION = 5.0
"""Seconds for the accuracy at up to 100 turns, and to spare."""


def addition(report: Report, device: str, small: bool) -> None:
    """With schedules as short as the run."""
    report.attempt("addition", lambda: train_addition(report, device, small))


def train_addition(report: Report, device: str, small: bool) -> None:
    recipe, limit = ("addition-quick-stars", 8) if small else ("addition", 1000)

    def go(folder: str, steps: int, *more: str) -> tuple[list[dict[str, Any]], float]:
        fifth = max(steps // 5, 1)
        words = (
            f"--steps {steps} --warmup_steps {fifth} --penalty.start_step {fifth} "
            f"--eval.limit {limit} --train.device {device} --train.report_to none --out {folder}"
        )
        decay = ["--decay_steps", "1"] if small else []
        begin = time.monotonic()
        train(load_config(recipe, [*words.split(), *decay, *more]))
        return read_metrics(Path(folder) / "metrics.jsonl"), time.monotonic() - begin

    with tempfile.TemporaryDirectory() as folder:
        if small:
            number, words = 20, ["--eval.turns", "2", "--train.log_every", "1"]
        else:
            few, words = 30, []
            go(f"{folder}/first", few)  # compiles, evaluates
            short, long = (
                go(f"{folder}/{n}", n * few, "--eval.turns", "")[1] for n in (1, 3)
            )  # what they share is the start
            a_step = max((long - short) / (2 * few), 1e-3)
            number = min(ALL, int((report.left - short - EVALUATION) / a_step))
        if number < 10:
            report.skip("addition")
            return
        rows, seconds = go(f"{folder}/run", number, *words)
        accuracy = json.loads((Path(folder) / "run/results.json").read_text())["accuracy"]
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    few = max(len(losses) // 5, 1)
    first, last = statistics.fmean(losses[:few]), statistics.fmean(losses[-few:])
    report.add("addition", {
        "steps": number, "of": ALL, "seconds": round(seconds, 1), "first_loss": round(first, 4),
        "last_loss": round(last, 4), "accuracy": accuracy,
    })  # fmt: skip
    if not last < first:
        report.fail(f"addition: the loss went from {first:.3f} to {last:.3f}")
