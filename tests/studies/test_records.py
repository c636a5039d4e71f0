"""Records of finished runs: what a study takes from them, what it adds, what it does not find."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stars_fast import cli
from stars_fast.base.errors import ConfigError
from stars_fast.training.config import save_config
from stars_fast.training.run import trainer
from stars_fast.training.scale.distributed import World
from studies import runner
from studies.definition import read_study, study_runs
from studies.judging import Judged
from studies.records import Records, settings_hash

ONE = ["--only", "pre, LayerNorm", "--train.steps", "2"]


def runs_of(study, *words, out="runs"):
    return study_runs(study, "quick", out, (0, 1), words)


def hash_of(study, *words, out="runs"):
    return settings_hash(runs_of(study, *words, out=out)[0], runner.MAY_DIFFER)


def test_the_hash_is_of_what_decides_the_figures(tiny):
    usual = hash_of(tiny)
    assert usual == hash_of(tiny, "--train.log_every", "1", "--threads", "2", out="other")
    assert usual == hash_of(tiny, "--optim.eps", "1e-8")  # its default
    assert usual == hash_of(tiny, "--eval.limit", "4")  # the study judges by itself
    for words in (
        ("--train.steps", "3"),
        ("--optim.lr", "0.1"),
        ("--eval.turns", "1,2,4"),
        ("--save_every", "3"),
    ):
        assert hash_of(tiny, *words) != usual, words
    known = {settings_hash(run, runner.MAY_DIFFER) for run in runs_of(tiny)}
    assert len(known) == len(runs_of(tiny))


@pytest.mark.parametrize("name", ["four-digits", "parity", "rivals", "rivals-text"])
def test_committed_records_are_those_of_the_study(name):
    """So that its command takes each for done, on whatever machine."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}-quick.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    seeds = sorted({record["seed"] for record in records})
    runs = study_runs(read_study(name), "quick", "runs", seeds, [])
    known = {settings_hash(run, runner.MAY_DIFFER): (run.label, run.seed) for run in runs}
    for record in records:
        assert known.get(record["settings"]) == (record["label"], record["seed"])
    assert len({record["settings"] for record in records}) == len(records)


@pytest.mark.slow
def test_a_recorded_run_is_done_elsewhere_and_another_definition_is_not(
    tiny, tmp_path, monkeypatch
):
    names = []

    def train(config, resume):
        names.append(config.name)
        return trainer.train(config, resume)

    monkeypatch.setattr(runner, "train", train)
    kept = tmp_path / "records" / "tiny.jsonl"

    def study(out, *words):
        command = ["study", "tiny", "--out", str(tmp_path / out), "--records", str(kept)]
        return cli.main([*command, *words])

    assert study("here", *ONE) == 0
    assert names == ["pre-layernorm-0"]
    line = kept.read_text()
    assert study("here", *ONE) == study("there", *ONE) == 0
    assert names == ["pre-layernorm-0"]
    assert kept.read_text() == line
    assert not (tmp_path / "there" / "pre-layernorm-0").exists()
    written = json.loads((tmp_path / "there" / "study.json").read_text())["runs"]
    assert [entry["status"] for entry in written] == ["done", "missing", "missing", "missing"]
    assert written[0]["accuracy"].keys() == json.loads(line)["accuracy"].keys()
    assert study("there", *ONE[:2], "--train.steps", "3") == 0
    assert names == ["pre-layernorm-0", "pre-layernorm-0"]
    assert len(kept.read_text().splitlines()) == 2


def test_numbers_are_kept_short(tiny, tmp_path):
    run = runs_of(tiny)[0]
    path = tmp_path / "kept.jsonl"
    Records(path, runner.MAY_DIFFER).add(run, {"seed": 0, "rms": {"1": 1.23456789, "2": None}})
    assert Records(path, runner.MAY_DIFFER).of(run) == {
        "seed": 0,
        "rms": {"1": 1.2346, "2": None},
    }
    Records(None, runner.MAY_DIFFER).add(run, {"seed": 0})  # of no file none are kept


def test_a_file_that_ends_without_a_line_break_takes_more_records(tiny, tmp_path):
    path = tmp_path / "kept.jsonl"
    path.write_text('{"settings": "0", "seed": 7}')  # as an editor or a merge may leave it
    run = runs_of(tiny)[0]
    Records(path, runner.MAY_DIFFER).add(run, {"seed": 0})
    assert len(path.read_text().splitlines()) == 2
    assert Records(path, runner.MAY_DIFFER).of(run) == {"seed": 0}


def test_a_record_goes_by_the_names_of_the_study_that_takes_it(tiny, tmp_path):
    """A level that has another name since, or the same settings in another study."""
    path, world = tmp_path / "kept.jsonl", World(0, 1, torch.device("cpu"))
    run = runs_of(tiny)[0]
    before = {"status": "done", "label": "first", "levels": {"place": "first"}, "seed": 0}
    Records(path, runner.MAY_DIFFER).add(run, before | {"rms": {"1": 1.0}})
    found = runner.run_entry(run, world, Records(path, runner.MAY_DIFFER))
    assert (found["label"], found["levels"]) == (run.label, run.levels)
    assert (found["status"], found["rms"]) == ("done", {"1": 1.0})


def test_where_several_checkpoints_are_judged_a_folder_with_others_is_another_run(tiny, tmp_path):
    """Their mean goes into a record, by the hash of the definition's."""
    run = runs_of(tiny, out=tmp_path)[0]
    other = replace(run.config, train=replace(run.config.train, save_every=3))
    run.folder.mkdir()
    save_config(other, run.folder / "config.yaml")
    runner.check_folders([run])
    with pytest.raises(ConfigError, match=r"train\.save_every was 3 and is 2"):
        runner.check_folders([replace(run, judged=Judged(checkpoints=2))])


@pytest.mark.parametrize("line", ["{", "[1]", '{"seed": 0}'])
def test_a_broken_line_is_named(tmp_path: Path, line):
    path = tmp_path / "kept.jsonl"
    path.write_text(f'{{"settings": "0"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"kept\.jsonl, line 2: expected a record of a run"):
        Records(path, runner.MAY_DIFFER)
