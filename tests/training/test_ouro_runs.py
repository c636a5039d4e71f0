"""Whole runs of the Ouro trainer: independent of the split over micro-batches and processes."""

from pathlib import Path

import pytest
import torch
from ouro_runs import ouro_run
from saved import saved_tensors

from stars_fast.training.checkpoint import checkpoints
from stars_fast.training.config import save_config
from stars_fast.training.metrics import read_metrics

SCRIPT = str(Path(__file__).parent / "scripts" / "ouro.py")
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
        # One process has as many micro-batches as two, so that their depths are the same.
        train={"steps": 20, "accumulation": 2, "batch_size": 8},
        parallel={"kind": kind},
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
    assert launch([SCRIPT, *map(written, one)]) == [0]
    assert launch([SCRIPT, *map(written, [*splits["ranks"], *both])], 2, timeout=200) == [0, 0]
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
