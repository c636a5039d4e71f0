"""Whole runs: independent of the split over micro-batches and ranks, and resumed to the last bit.

A process costs seconds before its first step, so a few processes share all runs.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stars_fast.base.checkpoints import checkpoints, saved_tensors
from stars_fast.training.config import save_config
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.trainer import train

pytestmark = pytest.mark.slow

SPLIT = {
    "double-jsrr": {"method": "jsrr"},
    "double-truncated": {"method": "jsrr", "train": {"backprop_turns": 1}},
    "double-l2": {"method": "l2", "depth": {"law": "fixed", "value": 3}},
    "double-rivals": {
        "method": "fixed-point",
        "depth": {"law": "fixed", "value": 3},
        "model": {"injection": "adapter", "state": "noise"},
        "loop": {"noise": 0.1, "progressive": 0.3, "free_turns": 1},
    },
    "double-graphs": {"method": "jsrr", "train": {"graphs": "on"}},
    "double-nan": {"method": "jsrr"},
}
ACCUMULATION = {"whole": 1, "fours": 4, "ranks": 2}

TEN_STEPS = {
    "model": {"dropout": 0.1},
    "depth": {"stratified": True},
    "penalty": {"start_step": 2, "ramp_steps": 5},
    "optim": {"warmup_steps": 3},
    "train": {"steps": 10, "accumulation": 2, "save_every": 5, "log_every": 1},
}


@pytest.fixture(scope="module")
def runs(tiny_in, launch, tmp_path_factory):
    """The folder of all runs, after the split ones and the straight and killed ones."""
    folder = tmp_path_factory.mktemp("runs")

    def config(name, **changes):
        path = folder / f"{name}.yaml"
        save_config(tiny_in(folder / name, **changes), path)
        return str(path)

    def split(name):
        for case, changes in SPLIT.items():
            train_section = {**changes.get("train", {}), "accumulation": ACCUMULATION[name]}
            yield config(f"{case}-{name}", **{**changes, "train": train_section})

    script = str(Path(__file__).parents[1] / "scripts" / "runs.py")
    alone = [*split("whole"), *split("fours"), config("killed-1", **TEN_STEPS)]
    assert launch([script, *alone]) == [-signal.SIGKILL]
    ten = [config(f"{name}-2", **TEN_STEPS) for name in ("signalled", "straight", "killed")]
    both = [*split("ranks"), *ten]
    assert launch([script, *both], processes=2) == [-signal.SIGKILL] * 2
    train(tiny_in(folder / "straight-1", **TEN_STEPS))
    return folder


def rows(folder):
    """The metrics of a run but the speed."""
    found = read_metrics(folder / "metrics.jsonl")
    for row in found:
        row.pop("tokens_per_second")
        row.pop("memory_gib")
    return found


def close(row, expected):
    return row.keys() == expected.keys() and all(
        value == pytest.approx(expected[name], rel=1e-9, abs=1e-12)
        if isinstance(value, float)
        else value == expected[name]
        for name, value in row.items()
    )


@pytest.mark.parametrize("case", SPLIT)
@pytest.mark.parametrize("split", ["fours", "ranks"])
def test_one_batch_of_16_is_4_of_4_is_2_ranks_of_2_of_4(runs, case, split):
    whole = rows(runs / f"{case}-whole")
    for row, expected in zip(rows(runs / f"{case}-{split}"), whole, strict=True):
        assert close(row, expected), f"step {row['step']}: {row} is not {expected}"


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(runs):
    found = rows(runs / "double-nan-ranks")
    assert [row["skipped"] for row in found] == [0, 0, 1, 1, 1, 1]
    assert found[2]["loss"] is None
    assert found[3]["loss"] is not None


@pytest.mark.parametrize("processes", [1, 2])
def test_ten_steps_are_five_and_kill_and_five_more(runs, launch, processes):
    straight, killed = runs / f"straight-{processes}", runs / f"killed-{processes}"
    assert sorted(checkpoints(killed / "checkpoints")) == [5]
    assert [row["step"] for row in read_metrics(killed / "metrics.jsonl")] == list(range(1, 8))

    command = ["-m", "stars_fast.cli", "train", str(killed), "--resume"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        whole = [sys.executable, *launcher, str(processes), *command]
        subprocess.run(whole, env=environment, check=True)
    else:
        assert launch(command) == [0]

    assert [row["step"] for row in rows(straight)] == list(range(1, 11))
    assert len({row["depth"] for row in rows(straight)}) > 1
    assert rows(killed) == rows(straight)
    one, other = (saved_tensors(checkpoints(run / "checkpoints")[10]) for run in (straight, killed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(runs):
    assert sorted(checkpoints(runs / "signalled-2" / "checkpoints")) == [4]
    assert [row["step"] for row in rows(runs / "signalled-2")] == [1, 2, 3, 4]
