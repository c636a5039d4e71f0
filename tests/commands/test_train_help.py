"""The help of `stars-fast train` in layers, and the dry run."""

import re

import pytest

from stars_fast.cli import main


def said(capsys, *words):
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_the_short_help_has_twelve_fields(capsys):
    text = said(capsys, "train", "--help")
    assert len(re.findall(r"(?m)^  --[\w.]+ ", text)) == 12
    assert "--penalty.weight float" in text
    assert "--help-all" in text
    assert "--resume auto" in text


@pytest.mark.parametrize("recipe", ["addition-quick-sft", "ouro-tiny", "ouro-numina-fast"])
def test_the_help_of_a_recipe_has_its_values(capsys, recipe):
    values = {
        "addition-quick-sft": ["--method sft", "--depth.value 4", "--train.batch_size 128"],
        "ouro-tiny": ["--method stars", "--data.source tiny-chat", "--optim.lr 0.003"],
        "ouro-numina-fast": ["--train.epochs ", "--model.path ByteDance/Ouro-1.4B"],
    }
    text = said(capsys, "train", recipe, "--help", "--seed", "7")
    shown = re.findall(r"(?m)^  (--[\w.]+ .*)$", text)
    assert len(shown) == 12
    assert "--seed 7" in shown
    assert all(any(line.startswith(each) for line in shown) for each in values[recipe])
    assert ("--penalty.weight" in text) == (recipe != "addition-quick-sft")  # SFT reads none
    assert not {"--train.steps none", "--train.epochs none"} & set(shown)


def test_all_fields_of_a_recipe(capsys):
    text = said(capsys, "train", "ouro-tiny", "--help-all")
    assert "--train.log_every 5\n      steps between lines of metrics. (int)" in text
    assert "--model.d_model" not in text  # of another family


@pytest.mark.parametrize(
    "recipe", ["addition-jsrr", "parity-quick", "huginn-tiny", "looped-tiny", "ouro-numina-lora"]
)
def test_a_dry_run_makes_nothing(capsys, tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(tmp_path)
    text = said(capsys, "train", recipe, "--dry-run", "--out", "here")
    assert "folder   here: new" in text
    assert text.endswith("nothing was made or loaded\n")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_counts_as_the_run_does(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "addition-quick-stars",
        "--steps",
        "2",
        "--eval.turns",
        "none",
        "--start_step",
        "1",
    ]
    dry = said(capsys, *words, "--dry-run")
    assert main(words) == 0
    told = capsys.readouterr().err
    cost = re.search(r"cost +(\S+ x SFT)", dry)[1]
    assert f"expected cost {cost}" in told
    assert "lambda 0.2 from step 1" in dry
    assert main([*words, "--dry-run"]) == 2
    assert "exists; continue that run" in capsys.readouterr().err
    assert "continues" in said(capsys, *words, "--dry-run", "--resume")


def refused(capsys, *words):
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_flags_take_no_value_and_either_spelling(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in ("--dry-run=1", "--dry_run=1"):
        told = refused(capsys, "train", "addition-quick", word)
        assert "--dry-run: expected no value, got '1'" in told
    assert said(capsys, "train", "addition-quick", "--dry_run").endswith("made or loaded\n")


def test_what_is_no_recipe_is_called_so(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "RECIPE: expected the name of a recipe" in refused(capsys, "train", "")
    assert "is a folder without config.yaml" in refused(capsys, "recipes", str(tmp_path))


def test_a_dry_run_sees_what_is_in_the_way(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    told = refused(capsys, "train", "addition-quick", "--dry-run", "--out", "file/run")
    assert f"file/run can't be a run folder: {tmp_path / 'file'} is a file" in told


def test_a_dry_run_asks_no_hub(capsys, tmp_path, monkeypatch):
    pytest.importorskip("transformers")

    def asked(*_, **__):
        raise AssertionError("a name was looked up")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.getaddrinfo", asked)
    words = ["--model.path", "nobody/nothing-here", "--dry-run"]
    text = said(capsys, "train", "looped-smollm2", *words)
    assert "size     not known: nobody/nothing-here is neither a folder here" in text
