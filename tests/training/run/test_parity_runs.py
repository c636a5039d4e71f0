"""A run on strings of bits: judged on longer ones, evaluated again, and drawn."""

import json

import pytest

from stars_fast.base.tree import merge
from stars_fast.cli import main
from stars_fast.training.config import config_from, load_config
from stars_fast.training.run.trainer import train

SMALL = {
    "method": "stars",
    "model": {"d_model": 16, "n_heads": 2, "d_ff": 32, "injection": "add", "positions": "none"},
    "data": {"kind": "parity", "bits": 4, "train_samples": 10, "test_samples": 6, "longer": [3]},
    "depth": {"low": 2, "high": 3},
    "train": {"steps": 4, "batch_size": 4, "threads": 1, "report_to": []},
    "eval": {"turns": [1, 3], "every": 2},
}


@pytest.mark.usefixtures("figures")
def test_a_run_is_judged_on_longer_strings(tmp_path, capsys):
    folder = train(config_from(merge(SMALL, {"out": str(tmp_path / "run")}))).folder
    results = json.loads((folder / "results.json").read_text())
    assert {name: list(curve) for name, curve in results.items() if name != "step"} == {
        "accuracy": ["1", "3"],
        "accuracy_3x": ["1", "3"],
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["accuracy_3x"].keys() == {"1", "3"} for row in rows if "accuracy" in row] == [True]
    assert "exact match_3x by turns  1: " in capsys.readouterr().err
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")

    assert main(["eval", str(folder), "--turns", "1,3", "--out", str(tmp_path / "out")]) == 0
    assert "_3x" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["accuracy"] == {str(folder): results["accuracy"]}
    assert written["further"] == {str(folder): {"accuracy_3x": results["accuracy_3x"]}}


def test_the_recipe_has_room_for_its_longest_strings():
    config = load_config("parity-quick")
    assert (config.model.max_length, config.model.vocab_size) == (41, 3)
    assert config.depth.low * (config.model.window - 1) >= config.data.bits
