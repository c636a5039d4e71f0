"""Samples of several lengths in a study: judged each, and a row and a panel for each."""

import pytest
import torch

from stars_fast.evaluation.addition import evaluate
from stars_fast.evaluation.run_data import open_data
from stars_fast.models.saved import find_model, load_model
from stars_fast.training.config import load_config
from stars_fast.training.run.trainer import train
from studies import outcome
from studies.curves import by_length, gather
from studies.definition import read_study
from studies.judging import Judged, judge_run


def entry(label, more):
    """A record of a run that is done, right at 0.1 a turn, and `more` of longer samples."""
    curves = {
        "accuracy" + name: {str(t): scale * t for t in (1, 2, 4)} for name, scale in more.items()
    }
    return {
        "label": label,
        "levels": {"method": label},
        "seed": 0,
        "status": "done",
        "depth": 2,
        "trained_turns": [1, 4],
        "seconds": 1.0,
        **curves,
    }


def test_each_length_is_a_setting_of_its_own():
    records = [entry("SFT", {"": 0.1, "_2x": 0.05}), entry("STARS", {"": 0.2, "_2x": 0.1})]
    found = by_length(gather(records))
    assert [each.label for each in found] == [
        "SFT, as trained", "STARS, as trained", "SFT, 2x", "STARS, 2x",
    ]  # fmt: skip
    assert [each.median["accuracy"][4] for each in found] == pytest.approx([0.4, 0.8, 0.2, 0.4])
    assert all(set(each.high) == {"accuracy"} for each in found)


def test_one_length_stays_as_it_is():
    results = gather([entry("SFT", {"": 0.1})])
    assert by_length(results) == results
    assert by_length([]) == []


def test_a_row_and_a_panel_for_each_length(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "studies.figure.draw_panels", lambda results, path, title, panels: drawn.append(panels)
    )
    drawn = []
    records = [entry("SFT", {"": 0.1, "_2x": 0.05, "_4x": 0.01})]
    text = outcome.write_outcome(read_study("parity"), "quick", tmp_path, records)
    assert drawn == ["length"]
    rows = [line.split(" | ")[1:6] for line in text.splitlines() if line.startswith("| SFT")]
    assert rows == [
        ["as trained", "2, to 4", "10.0", "20.0", "40.0"],
        ["2x", "2, to 4", "5.0", "10.0", "20.0"],
        ["4x", "2, to 4", "1.0", "2.0", "4.0"],
    ]


@pytest.mark.slow
def test_longer_strings_are_judged(tmp_path):
    words = "--data.bits 4 --data.train_samples 8 --data.test_samples 4 --steps 2"
    words += (
        " --eval.turns 1,2 --report_to none --model.d_model 16 --model.n_heads 2 --model.d_ff 16"
    )
    words += " --batch_size 2"
    out = tmp_path / "run"
    train(load_config("parity-quick", [*words.split(), "--out", str(out)]))
    found = judge_run(out, torch.device("cpu"), Judged(deepest=2))
    source = find_model(out)
    loop = source.family.loop(load_model(source))
    for name, strings in open_data(source).further.items():
        expected = evaluate(loop, strings, [1, 2])
        assert found[f"accuracy_{name}"] == {str(t): value for t, value in expected.items()}
    assert {"accuracy", "accuracy_2x", "accuracy_4x"} <= set(found)
