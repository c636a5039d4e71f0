"""Records of finished runs: what a study takes from them, what it adds, what it does not find."""

import json
from pathlib import Path

import pytest

from stars_fast import cli
from stars_fast.base.errors import ConfigError
from stars_fast.training.run import trainer
from studies import runner
from studies.definition import study_runs
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
    for words in (
        ("--train.steps", "3"),
        ("--optim.lr", "0.1"),
        ("--eval.turns", "1,2,4"),
        ("--save_every", "3"),
    ):
        assert hash_of(tiny, *words) != usual, words
    known = {settings_hash(run, runner.MAY_DIFFER) for run in runs_of(tiny)}
    assert len(known) == len(runs_of(tiny))


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


@pytest.mark.parametrize("line", ["{", "[1]", '{"seed": 0}'])
def test_a_broken_line_is_named(tmp_path: Path, line):
    path = tmp_path / "kept.jsonl"
    path.write_text(f'{{"settings": "0"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"kept\.jsonl, line 2: expected a record of a run"):
        Records(path, runner.MAY_DIFFER)
