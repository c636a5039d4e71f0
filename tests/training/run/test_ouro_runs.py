"""Whole runs of the Ouro trainer: independent of the split over micro-batches and processes, and
resumed on two processes and on one."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ouro_runs import ouro_run, rows_of

from stars_fast.base.checkpoints import checkpoints, saved_tensors
from stars_fast.training.config import save_config
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.trainer import train

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).parents[1] / "scripts" / "ouro.py")
METHODS = ("sft", "random-loop", "jsrr", "stars")
SPLITS = {"whole": 1, "thirty-two": 32, "ranks": 4}
PACKING = {"packed": True, "padded": False}


def split_run(folder, cache, name, split, packing):
    return ouro_run(
        folder / f"{name}-{split}",
        cache,
        method="jsrr",
        data={"packing": packing},
        train={"steps": 1, "batch_size": 32, "accumulation": SPLITS[split]},
    )


def parallel_run(folder, cache, method, kind):
    return ouro_run(
        folder / f"{method}-{kind}",
        cache,
        method=method,
        depth={"stratified": True} if method in ("random-loop", "stars") else {},
        penalty={"draw": "micro-batches", "fraction": 0.5} if method == "stars" else {},
        # One process has as many micro-batches as two, so that their depths are the same.
        train={"steps": 20, "accumulation": 2, "batch_size": 8},
        parallel={"kind": kind},
        data={"validation": 10},
        eval={"turns": [1, 4], "every": 10, "rows": 4},  # three passes for two processes
    )


def resumed_run(folder, cache, fate, name):
    packing = PACKING[name]
    return ouro_run(
        folder / f"{name}-{fate}",
        cache,
        data={"packing": packing, "samples": 30},
        depth={"stratified": True},
        # Which samples a fraction is depends on the number of micro-batches, so not where the run
        # goes on in one process.
        penalty={"start_step": 2, "ramp_steps": 5, "fraction": 0.5 if packing else 1.0},
        optim={"warmup_steps": 3},
        train={"steps": 10, "accumulation": 2, "save_every": 5},
    )


@pytest.fixture(scope="module")
def runs(launch, tmp_path_factory):
    """The folder of all runs: what one process does, and what two do."""
    folder = tmp_path_factory.mktemp("ouro")

    def written(config):
        path = folder / f"{config.name}.yaml"
        save_config(config, path)
        return str(path)

    cache = folder / "cache"
    splits = {
        split: [split_run(folder, cache, name, split, way) for name, way in PACKING.items()]
        for split in SPLITS
    }
    alone = [parallel_run(folder, cache, method, "auto") for method in METHODS]
    both = [parallel_run(folder, cache, m, kind) for m in METHODS for kind in ("ddp", "fsdp")]
    one = [*splits["whole"], *splits["thirty-two"], *alone]
    assert launch([SCRIPT, *map(written, one)], timeout=250) == [0]
    straight = [resumed_run(folder, cache, "straight", name) for name in PACKING]
    broken = [
        resumed_run(folder, cache, "lost", "padded"),
        resumed_run(folder, cache, "killed", "packed"),
    ]
    two = [*map(written, [*splits["ranks"], *both, *straight, *broken])]
    assert launch([SCRIPT, *two], 2, timeout=400) == [-signal.SIGKILL] * 2
    for run in broken:
        shutil.copytree(run.out, f"{run.out}-before")
    assert launch([SCRIPT, *map(written, broken)], 2, timeout=250) == [0, 0]
    return folder


def relative_difference(mine, other):
    """Of the lists of tensors as one vector."""
    a, b = (torch.cat([tensor.flatten() for tensor in each]).double() for each in (mine, other))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", PACKING)
@pytest.mark.parametrize("split", ["thirty-two", "ranks"])
def test_the_gradient_does_not_depend_on_the_split(runs, name, split):
    whole, parts = (torch.load(runs / f"{name}-{each}.grad.pt") for each in ("whole", split))
    assert relative_difference(parts, whole) < 1e-5
    (expected,), (row,) = (
        read_metrics(runs / f"{name}-{each}" / "metrics.jsonl") for each in ("whole", split)
    )
    for figure in ("loss", "penalty", "grad_norm", "tokens"):
        assert row[figure] == pytest.approx(expected[figure], rel=1e-5), figure


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_are_one(runs, method, kind):
    """Over 20 steps; what differs is the order of sums in fp32, which AdamW's division blows up
    where a gradient is near zero."""
    one, two = runs / f"{method}-auto", runs / f"{method}-{kind}"
    rows = [read_metrics(run / "metrics.jsonl") for run in (one, two)]
    assert len(rows[0]) == len(rows[1]) == 20
    for expected, row in zip(*rows, strict=True):
        assert row["depth"] == expected["depth"]
        for figure in ("loss", "penalty", "grad_norm"):
            if expected[figure] is not None:
                assert row[figure] == pytest.approx(expected[figure], rel=1e-4), figure
    weights = [saved_tensors(checkpoints(run / "checkpoints")[20]) for run in (one, two)]
    names = [name for name in weights[0] if name.startswith("model.")]
    assert names
    assert relative_difference(*([each[n] for n in names] for each in weights[::-1])) < 1e-5


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_judge_as_one(runs, method, kind):
    """In the middle and at the end; after 20 steps the weights differ by rounding."""
    one, two = runs / f"{method}-auto", runs / f"{method}-{kind}"
    judged = [
        [row["validation_loss"] for row in read_metrics(run / "metrics.jsonl") if row["step"] == 10]
        + [json.loads((run / "results.json").read_text())["validation_loss"]]
        for run in (one, two)
    ]
    assert len(judged[0]) == 2
    for expected, found in zip(*judged, strict=True):
        assert expected.keys() == {"1", "4"}
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("name", "fate"), [("packed", "killed"), ("padded", "lost")])
def test_two_processes_resume_to_the_last_bit(runs, name, fate):
    straight, broken = runs / f"{name}-straight", runs / f"{name}-{fate}"
    before = Path(f"{broken}-before")
    assert sorted(checkpoints(before / "checkpoints")) == [5]
    assert [row["step"] for row in read_metrics(before / "metrics.jsonl")] == list(range(1, 8))
    rows = rows_of(straight)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert len({row["depth"] for row in rows}) > 1
    assert rows_of(broken) == rows
    one, other = (saved_tensors(checkpoints(run / "checkpoints")[10]) for run in (straight, broken))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[tensor], other[tensor]) for tensor in one)


def test_one_process_goes_on_where_two_were(runs, capfd):
    """With the same samples in the same order, at the same depths, with the same noise: what
    differs is the order of sums in fp32."""
    before = runs / "padded-lost-before"
    config = resumed_run(runs, runs / "cache", "lost", "padded")
    train(replace(config, out=str(before)), resume=True)
    assert "the checkpoint is of 2 processes and 1 go on" in capfd.readouterr().err
    expected, rows = rows_of(runs / "padded-straight"), rows_of(before)
    assert rows[:5] == expected[:5]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    for row, straight in zip(rows[5:], expected[5:], strict=True):
        assert row["depth"] == straight["depth"]
        for figure in ("loss", "penalty", "grad_norm"):
            assert row[figure] == pytest.approx(straight[figure], rel=1e-4), figure
