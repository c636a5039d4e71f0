"""Figures of a trained run of a study, by number of turns; kept in its folder until another
checkpoint is there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stars_fast.analysis.report.summary import number
from stars_fast.analysis.spectrum import settled_radius
from stars_fast.analysis.trajectory import trajectory
from stars_fast.base.files import write_text
from stars_fast.base.machine import describe
from stars_fast.base.run_folder import RunFolder
from stars_fast.data.batches import MicroBatch, micro_batch, to_device
from stars_fast.evaluation.addition import evaluate
from stars_fast.evaluation.run_data import data_of, open_data
from stars_fast.models.loop import Loop
from stars_fast.models.saved import ModelSource, find_model, load_model
from stars_fast.training.run.metrics import read_metrics

DEEPEST = 100
"""Turns up to which addition models are judged, at every number of them: the paper's."""
RADIUS_TURNS = (4, 16, 64)
TOLERANCE = 1e-3
"""Residual of an eigenpair, over its eigenvalue, at which a spectral radius is settled."""
SAMPLES = 32
"""Unseen sums whose states are looked at."""


def judge_run(folder: Path, device: torch.device) -> dict[str, Any]:
    """The figures of the run in `folder`, by number of turns as text.

    Of sums: `accuracy` in [0, 1]; and as means over some samples `radius` (spectral radius of the
        block at the state after so many turns), `rms` (root mean square of the state) and
        `residual` (size of that turn's step over that of the state before); the shares of these
        samples that are `contracting` (a radius below 1), and whose radius `settled` to `TOLERANCE`
        (that of others is an estimate).
    Of text: the metrics of the end of the run, such as `validation_loss` in nats.

    And `seconds` of training (without evaluation and saving) and the `machine`. Values that are not
    finite are None.

    Raises:
        ConfigError: there is no checkpoint.
    """
    run = RunFolder(folder)
    asked = {
        "checkpoint": run.checkpoint().name,
        "deepest": DEEPEST,
        "samples": SAMPLES,
        "radius_turns": list(RADIUS_TURNS),
        "tolerance": TOLERANCE,
    }
    kept = folder / "judged.json"
    if kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["asked"] == asked:
            return found
    source = find_model(folder)
    if data_of(source)[0].exact_match:
        figures = _judge_sums(source, device)
    else:
        results = json.loads(run.results.read_text(encoding="utf-8"))
        results.pop("step")
        figures = {
            name: {turn: number(float(value)) for turn, value in curve.items()}
            for name, curve in results.items()
        }
    seconds = training_seconds(read_metrics(run.metrics))
    found = {"asked": asked, **figures, "seconds": seconds, "machine": describe(device)}
    write_text(kept, json.dumps(found, indent=1) + "\n")
    return json.loads(kept.read_text(encoding="utf-8"))  # the same whether it was kept or not


def training_seconds(rows: list[dict[str, Any]]) -> float:
    """Seconds of the steps of a run, from its metrics."""
    seconds, before = 0.0, 0
    for row in rows:
        seconds += (row["tokens"] - before) / row["tokens_per_second"]
        before = row["tokens"]
    return round(seconds, 1)


def _judge_sums(source: ModelSource, device: torch.device) -> dict[str, Any]:
    loop = source.family.loop(load_model(source, device=str(device)))
    sums = open_data(source).held_out
    assert sums is not None
    batch = to_device(micro_batch(sums, np.arange(min(SAMPLES, len(sums)))), device)
    turns = list(range(1, DEEPEST + 1))
    return {"accuracy": evaluate(loop, sums, turns), **_states(loop, batch)}


@torch.no_grad()
def _states(loop: Loop, batch: MicroBatch) -> dict[str, dict[int, float | None]]:
    """Figures of the states, by turn, as `judge_run` says."""
    radii: dict[str, dict[int, float | None]] = {
        "radius": dict.fromkeys(RADIUS_TURNS),
        "contracting": dict.fromkeys(RADIUS_TURNS, 0.0),
        "settled": dict.fromkeys(RADIUS_TURNS, 0.0),
    }
    generator = torch.Generator(batch.tokens.device).manual_seed(0)
    start, inputs = loop.begin(batch.tokens, batch.samples)
    block = loop.turn(start, batch.samples, inputs)
    mask = batch.samples.real
    mask = None if mask is None else mask.to(start.device)

    def visit(turn: int, h: Tensor) -> None:
        if turn in RADIUS_TURNS and h.isfinite().all():
            radius, settled = settled_radius(
                block, h, mask=mask, tol=TOLERANCE, generator=generator
            )
            radii["radius"][turn] = number(float(radius.mean()))
            radii["contracting"][turn] = float((radius < 1).double().mean())
            radii["settled"][turn] = float((settled & radius.isfinite()).double().mean())

    path = trajectory(block, start, DEEPEST, mask=mask, visit=visit)
    means = {"rms": path.norm[1:], "residual": path.residual}
    sizes = {
        name: {turn: number(float(value)) for turn, value in enumerate(values.mean(1), start=1)}
        for name, values in means.items()
    }
    return {**sizes, **radii}
