"""Whole runs with graphs, by their stand-in on the CPU."""

import re
from pathlib import Path

import pytest
import torch
from ouro_runs import ouro_run

from stars_fast.base.checkpoints import latest, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.training.config import LoopConfig, load_config, save_config
from stars_fast.training.graphs.recorder import stand_in
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.trainer import train

TEN = {
    "model": {"dropout": 0.1},
    "penalty": {"start_step": 2, "ramp_steps": 5},
    "train": {"steps": 10, "accumulation": 2, "graphs": "on"},
}


def outcome(config, resume=False):
    """The weights at the end, and losses and penalties."""
    folder = train(config, resume).folder
    rows = read_metrics(folder / "metrics.jsonl")
    return saved_tensors(latest(folder / "checkpoints")), [
        (row["loss"], row["penalty"], row["grad_norm"]) for row in rows
    ]


def same(one, other):
    weights, rows = zip(one, other, strict=True)
    return rows[0] == rows[1] and all(
        torch.equal(weights[0][name], weights[1][name]) for name in weights[0]
    )


@pytest.mark.slow
def test_a_run_has_the_bits_of_one_without_graphs_and_so_has_its_resumption(
    tiny_in, tmp_path, capsys
):
    plain = outcome(
        tiny_in(tmp_path / "plain", **TEN | {"train": TEN["train"] | {"graphs": "off"}})
    )
    assert "graphs" not in capsys.readouterr().err
    with stand_in():
        graphed = outcome(tiny_in(tmp_path / "graphed", **TEN))
        told = capsys.readouterr().err
        assert "graphs: micro-batches of 1 to 6 turns, 100.0% of all, in at most 12 pairs" in told
        folder = tiny_in(tmp_path / "parts", **TEN | {"train": TEN["train"] | {"save_every": 5}})
        outcome(folder)
        (tmp_path / "parts" / "checkpoints" / "step-000010").rename(tmp_path / "gone")
        again = outcome(load_config(str(tmp_path / "parts")), resume=True)
    assert same(plain, graphed)
    assert same(graphed, again)


@pytest.mark.slow
def test_a_packed_run_fills_its_rows_and_one_of_ragged_rows_goes_without(tmp_path, capsys):
    short = {"steps": 1, "batch_size": 2}
    with stand_in():
        train(ouro_run(tmp_path / "packed", tmp_path, train=short | {"graphs": "on"}))
        assert "graphs: micro-batches of" in capsys.readouterr().err
        ragged = {"packing": False, "max_length": 160}
        auto = short | {"graphs": "auto"}
        train(ouro_run(tmp_path / "ragged", tmp_path, train=auto, data=ragged))
    told = capsys.readouterr().err
    assert re.search(
        r"graphs: none, as of rows of one length \d\d% would be pads; data.packing", told
    )


@pytest.mark.slow
def test_what_one_process_can_not_capture_is_refused_or_left_on_all(tiny_in, launch, tmp_path):
    """In the trial before the first step, and at a kind of micro-batch that comes later."""
    paths = []
    for name in ("trial-on", "later-on", "later-auto"):
        section = {"steps": 16, "accumulation": 1, "graphs": name.partition("-")[2]}
        later = {"start_step": 8}
        config = tiny_in(tmp_path / name, method="jsrr", train=section, penalty=later)
        paths.append(tmp_path / f"{name}.yaml")
        save_config(config, paths[-1])
    script = Path(__file__).parents[1] / "scripts" / "graphs.py"
    command = [str(script), str(tmp_path), *map(str, paths)]
    assert launch(command, processes=2, timeout=300) == [0, 0]
    said = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    asked = "train.graphs: expected auto or off, got on: process 1: "
    why = "can't be captured: RuntimeError: operation not permitted when a stream is capturing"
    for rank in (0, 1):
        assert said[f"trial-on-{rank}"] == f"{asked}the turns {why}"
        assert said[f"later-on-{rank}"] == f"{asked}a micro-batch of 3 turns {why}"
        assert said[f"later-auto-{rank}"] == ""
    assert len(read_metrics(tmp_path / "later-on" / "metrics.jsonl")) == 8
    assert len(read_metrics(tmp_path / "later-auto" / "metrics.jsonl")) == 16


REFUSED = {
    "parallel.kind fsdp gathers weights anew": {"parallel": {"kind": "fsdp"}},
    "train.compile is true": {"train": {"compile": True}},
    "loop.noise is drawn before every turn": {"loop": {"noise": 0.1}},
    "loop.progressive adds turns": {"loop": {"progressive": 0.1}},
    "penalty.power_steps asks for random states": {"penalty": {"power_steps": 2}},
    "penalty.draw samples cuts other samples out": {"penalty": {"fraction": 0.5}},
    "model.attention flex_attention is another's code": {"model": {"attention": "flex_attention"}},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_can_not_be_captured_is_named(tmp_path, why):
    changes = REFUSED[why]
    changes = changes | {"train": changes.get("train", {}) | {"graphs": "on"}}
    with pytest.raises(
        ConfigError, match=re.escape(f"train.graphs: expected auto or off, got on: {why}")
    ):
        ouro_run(tmp_path / "run", tmp_path, **changes)


def test_without_a_gpu_graphs_that_are_asked_for_are_an_error(tiny):
    with pytest.raises(ConfigError, match="got on: the device is cpu, which has no graphs"):
        train(tiny(train={"graphs": "on"}))
    with pytest.raises(ValueError, match="graphs: expected auto, on or off, got 'yes'"):
        LoopConfig(graphs="yes")
