"""Figures of a trained run of a study, by number of turns; kept in its folder until another
checkpoint is there."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stars_fast.analysis.spectrum import settled_radius
from stars_fast.analysis.trajectory import trajectory
from stars_fast.base.checkpoints import checkpoints
from stars_fast.base.files import finite, write_text
from stars_fast.base.machine import describe
from stars_fast.base.run_folder import RunFolder
from stars_fast.data.batches import MicroBatch, Source, micro_batch, to_device
from stars_fast.data.samples import sample_noise
from stars_fast.evaluation.addition import evaluate, judged_on
from stars_fast.evaluation.run_data import data_of, open_data
from stars_fast.models.loop import Loop
from stars_fast.models.saved import ModelSource, find_model, load_model
from stars_fast.training.config import load_config
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.step.cost import relative_cost

RADIUS_TURNS = (4, 16, 64)
TOLERANCE = 1e-3
"""Residual of an eigenpair, over its eigenvalue, at which a spectral radius is settled."""
SAMPLES = 32
"""Unseen sums whose states are looked at."""
LATELY = 250
"""Unseen sums that each of several checkpoints is judged on; the newest alone is on 1,000."""


class Judged(NamedTuple):
    """How a run on sums is judged.

    deepest: turns up to which, at every number of them; by default the paper's.
    checkpoints: newest ones that the accuracy is a mean of too, at `eval.turns`, as `lately`.
    starts: whether the states that two different first states lead to are compared, as `apart`.
    """

    deepest: int = 100
    checkpoints: int = 1
    starts: bool = False


USUAL = Judged()
"""As most studies judge."""


def judge_run(folder: Path, device: torch.device, judged: Judged = USUAL) -> dict[str, Any]:
    """The figures of the run in `folder`, by number of turns as text.

    Of sums: `accuracy` in [0, 1], and that on further samples where the data have them, such as
        `accuracy_2x` of strings twice as long; and as means over some samples `radius` (spectral
        radius of the block at the state after so many turns), `rms` (root mean square of the state)
        and `residual` (size of that turn's step over that of the state before); the shares of these
        samples that are `contracting` (a radius below 1), and whose radius `settled` to `TOLERANCE`
        (that of others is an estimate).
        Where `judged` asks, `lately` (the mean accuracy of the newest checkpoints) and `apart` (how
        far the state that follows a first state of noise is from the usual one, over its size).
        And `counted_cost`, that of a step over SFT's at `train.reference_turns`.
    Of text: the metrics of the end of the run, such as `validation_loss` in nats.

    And `seconds` of training (without evaluation and saving) and the `machine`. Values that are not
    finite are None.

    Raises:
        ConfigError: there is no checkpoint.
    """
    run = RunFolder(folder)
    asked = {
        "checkpoint": run.checkpoint().name,
        "deepest": judged.deepest,
        "samples": SAMPLES,
        "radius_turns": list(RADIUS_TURNS),
        "tolerance": TOLERANCE,
    }
    if judged.checkpoints > 1:
        asked["lately"] = LATELY
        asked["checkpoints"] = [path.name for path in _newest(run, judged.checkpoints)]
    if judged.starts:
        asked["starts"] = True
    kept = folder / "judged.json"
    if kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["asked"] == asked:
            return found
    source = find_model(folder)
    if data_of(source)[0].exact_match:
        figures = _judge_sums(source, device, judged)
    else:
        results = json.loads(run.results.read_text(encoding="utf-8"))
        results.pop("step")
        figures = {
            name: {turn: finite(float(value)) for turn, value in curve.items()}
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


def _newest(run: RunFolder, count: int) -> list[Path]:
    """The newest checkpoints of a run, at most so many."""
    return [path for _, path in sorted(checkpoints(run.checkpoints).items())][-count:]


def _judge_sums(source: ModelSource, device: torch.device, judged: Judged) -> dict[str, Any]:
    loop = source.family.loop(load_model(source, device=str(device)))
    unseen = judged_on(open_data(source))
    sums = unseen["accuracy"]
    batch = to_device(micro_batch(sums, np.arange(min(SAMPLES, len(sums)))), device)
    config = load_config(str(source.run.path))
    outside = loop.outside_block(len(batch.labels) / batch.tokens.numel())
    found = {
        **{
            name: evaluate(loop, each, list(range(1, judged.deepest + 1)))
            for name, each in unseen.items()
        },
        **_states(loop, batch, judged.deepest),
        "counted_cost": relative_cost(config, outside),
    }
    if judged.starts:
        found["apart"] = _apart(loop, batch, [*RADIUS_TURNS, judged.deepest])
    if judged.checkpoints > 1:
        found["lately"] = _lately(source, device, sums, config.eval.turns, judged.checkpoints)
    return found


def _lately(
    source: ModelSource, device: torch.device, sums: Source, turns: Sequence[int], count: int
) -> dict[int, float]:
    """Mean accuracy of the newest checkpoints on some sums, by turns."""
    curves = []
    for path in _newest(source.run, count):
        each = find_model(source.path, int(path.name.rpartition("-")[2]))
        loop = each.family.loop(load_model(each, device=str(device)))
        curves.append(evaluate(loop, sums, list(turns), limit=LATELY))
    return {turn: sum(curve[turn] for curve in curves) / len(curves) for turn in turns}


@torch.no_grad()
def _apart(loop: Loop, batch: MicroBatch, turns: Sequence[int]) -> dict[int, float | None]:
    """How far the state of a run from standard normal noise is from the usual one, over the size of
    that, by turns; a mean over the samples."""
    start, inputs = loop.begin(batch.tokens, batch.samples)
    block = loop.turn(start, batch.samples, inputs)
    noise = sample_noise(start, batch.samples, 0, 0, range(batch.samples.count))
    mask = batch.samples.real
    real = 1.0 if mask is None else mask.to(start.device)[..., None]
    found = {}
    one, other = start, noise
    for turn in range(1, max(turns) + 1):
        one, other = block(one), block(other)
        if turn in turns:
            gap, size = (((x * real).flatten(1).norm(dim=1)) for x in (one - other, one))
            found[turn] = finite(float((gap / size).mean()))
    return found


@torch.no_grad()
def _states(
    loop: Loop, batch: MicroBatch, deepest: int = USUAL.deepest
) -> dict[str, dict[int, float | None]]:
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
            radii["radius"][turn] = finite(float(radius.mean()))
            radii["contracting"][turn] = float((radius < 1).double().mean())
            radii["settled"][turn] = float((settled & radius.isfinite()).double().mean())

    path = trajectory(block, start, deepest, mask=mask, visit=visit)
    means = {"rms": path.norm[1:], "residual": path.residual}
    sizes = {
        name: {turn: finite(float(value)) for turn, value in enumerate(values.mean(1), start=1)}
        for name, values in means.items()
    }
    return {**sizes, **radii}
