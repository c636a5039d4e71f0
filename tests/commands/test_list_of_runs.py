"""`stars-fast runs` and `stars-fast recipes NAME`."""

import json

import pytest

from stars_fast.base.unique_keys import parse_yaml
from stars_fast.cli import main
from stars_fast.training.config import config_from, load_config, save_config


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Three runs in runs/: one done, one half-way, one of chats."""
    monkeypatch.chdir(tmp_path)
    made = {
        "strong": ["addition-quick-stars", "--penalty.weight", "0.5"],
        "weak": ["addition-quick-stars", "--penalty.weight", "0.05"],
        "study/chats": ["ouro-tiny"],
    }
    for name, (recipe, *words) in made.items():
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        save_config(load_config(recipe, words), folder / "config.yaml")
        rows = [{"step": step, "loss": 3.0 / step, "lr": 1e-3, "lambda": step > 1, "depth": 4.0}
                for step in (1, 2, 3)]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    strong = {"step": 3200, "accuracy": {"1": 0.1, "4": 1.0, "8": 0.9, "100": 0.25}}
    (tmp_path / "runs/strong/results.json").write_text(json.dumps(strong))
    chats = {"step": load_config("ouro-tiny").train.steps, "validation_loss": {"4": 0.75}}
    (tmp_path / "runs/study/chats/results.json").write_text(json.dumps(chats))
    return tmp_path / "runs"


def test_the_table_shows_what_differs(runs, capsys):
    assert main(["runs", "runs/strong", "runs/weak"]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == "run state weight loss accuracy at 4 accuracy at 8 accuracy at 100".split()
    assert rows[0] == ["strong", "done", "0.5", "1", "100.0%", "90.0%", "25.0%"]
    assert rows[1] == "weak step 3 of 3,200, nothing saved 0.05 1".split()


def test_a_run_that_goes_on_after_its_end_is_not_done(runs, capsys):
    strong = runs / "strong"
    settings = (strong / "config.yaml").read_text()
    for steps, state in (("4000", "step 3,200 of 4,000"), ("null", "done"), ("3200", "done")):
        text = settings.replace("steps: 3200\n", f"steps: {steps}\n", 1)
        (strong / "config.yaml").write_text(text)
        assert main(["runs", "runs/strong"]) == 0
        assert state in capsys.readouterr().out
    with (strong / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3300, "loss": 0.1}\n')
    assert main(["runs", "runs/strong"]) == 0
    said = capsys.readouterr().out
    assert "step 3,300 of 3,200, nothing saved, results of step 3,200" in said
    assert "25.0%" in said


def test_runs_are_found_in_folders(runs, capsys):
    assert main(["runs", "--figure", "curves.png"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["strong", "study/chats", "weak"]
    assert "0.75" in text
    assert "validation loss at 4" in text
    assert (runs.parent / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("results.json", '{"accuracy": {"4": ', "results.json can't be read"),
        ("results.json", '{"accuracy": {"4": null}}', "results.json can't be read"),
        ("results.json", "[1]", "results.json can't be read"),
        ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl, line 1: expected metrics, got {'loss"),
        ("metrics.jsonl", '{"step": 1, "loss": "x"}\n', "metrics.jsonl, line 1: expected metrics"),
        ("metrics.jsonl", "3\n", "metrics.jsonl, line 1: expected metrics, got 3"),
        ("metrics.jsonl", "\x80", "metrics.jsonl can't be read"),
        ("config.yaml", "train: [", "config.yaml can't be read"),
    ],
)
def test_a_damaged_run_is_named_and_hides_no_other(runs, capsys, name, text, said):
    (runs / "strong" / name).write_text(text, encoding="latin1")
    assert main(["runs", "runs/strong"]) == 2
    assert said in capsys.readouterr().err
    assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["study/chats", "weak"]
    assert said in err


def test_a_number_of_steps_that_is_none_hides_nothing(runs, capsys):
    (runs / "weak/config.yaml").write_text("train: {steps: many}")
    assert main(["runs", "runs/weak"]) == 0
    assert "step 3, nothing saved" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--all"]])
def test_a_recipe_resolved_is_a_recipe(capsys, more):
    assert main(["recipes", "addition-quick-sft", *more]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# addition-quick-sft on addition-quick-stars: ")
    shown = parse_yaml(text)
    assert ("parallel" in shown) == bool(more)
    assert config_from({"name": "addition-quick-sft", **shown}) == load_config("addition-quick-sft")
