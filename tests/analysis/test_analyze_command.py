"""`stars-fast analyze` on tiny runs and checkpoints, and the mistakes one can make with it."""

import json
import re
import sys

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("safetensors")

from stars_fast.analysis.subjects import Request, find_subject
from stars_fast.base.tree import merge
from stars_fast.cli import main
from stars_fast.evaluation.addition import evaluate
from stars_fast.evaluation.run_data import open_data
from stars_fast.models.families.looped_lm import LoopedLoop
from stars_fast.models.saved import find_model, load_model
from stars_fast.training.config import config_from
from stars_fast.training.run.trainer import Trainer, train

ADDITION = {
    "method": "sft",
    "model": {"d_model": 16, "n_heads": 2, "d_ff": 32},
    "data": {"digits": 1, "train_samples": 60, "test_samples": 9},
    "depth": {"law": "fixed", "value": 3},
    "train": {"steps": 2, "batch_size": 8, "save_every": 1, "threads": 1, "report_to": []},
    "eval": {"turns": []},
}
OURO = {
    "task": "ouro",
    "method": "stars",
    "precision": "float32",
    "model": {"path": "tiny", "width": 32, "layers": 1},
    "data": {
        "source": "tiny-chat", "samples": 20, "validation": 5, "max_length": 96, "system": None,
        "workers": 1,
    },
    "depth": {"law": "lognormal", "mu": 1.0, "sigma": 0.4, "high": 5},
    "train": {"steps": 1, "batch_size": 2, "save_every": 0, "threads": 1, "report_to": []},
    "eval": {"turns": []},
}  # fmt: skip
SMALL = ["--turns", "6", "--samples", "3", "--jacobian-at", "2,6"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run of each task, and an Ouro checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_draw", lambda *_: None)
        for name, mapping in (("sums", ADDITION), ("ouro", OURO)):
            if name == "ouro":
                pytest.importorskip("transformers")
                pytest.importorskip("datasets")
                mapping = merge(mapping, {"data": {"cache": str(folder / "cache")}})
            train(config_from(merge(mapping, {"out": str(folder / name), "name": name})))
    assert main(["export", str(folder / "ouro"), str(folder / "checkpoint"), "--turns", "3"]) == 0
    return folder


def found_in(folder):
    return json.loads((folder / "analysis.json").read_text())


@pytest.mark.slow
def test_a_run_of_sums(home, tmp_path, capsys):
    run = str(home / "sums")
    assert main(["analyze", run, *SMALL, "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {
        "analysis.html", "analysis.json", "analysis.png", "paths.png",
    }  # fmt: skip
    found = found_in(tmp_path)["runs"]["sums"]
    assert found["what"] == "step 2, 3 unseen 1-digit sums"
    assert found["trained_turns"] == 3
    source = find_model(run)
    loop = LoopedLoop(load_model(source))
    accuracy = evaluate(loop, open_data(source).held_out, list(range(1, 7)))
    assert found["accuracy"] == {str(t): value for t, value in accuracy.items()}
    assert list(found["jacobian"]) == ["2", "6"]
    assert [len(row) for row in found["trajectory"]["norm"]] == [3] * 7
    assert found["verdict"] in capsys.readouterr().out


def test_an_earlier_checkpoint_and_the_default_folder(home):
    run = home / "sums"
    assert main(["analyze", str(run), *SMALL, "--step", "1", "--seed", "3"]) == 0
    content = found_in(run)
    assert content["runs"]["sums"]["what"].startswith("step 1,")
    assert content["settings"]["seed"] == 3


@pytest.mark.slow
def test_runs_and_checkpoints_beside_each_other(home, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("two and three\nare five\n\n\n  \nx\n\nwhat is this? " * 3)
    words = [str(home / "ouro"), str(home / "checkpoint"), "--text", str(text), *SMALL]
    assert main(["analyze", *words, "--length", "12", "--out", str(tmp_path / "out")]) == 0
    runs = found_in(tmp_path / "out")["runs"]
    assert list(runs) == ["ouro", "checkpoint"]
    assert runs["checkpoint"]["trained_turns"] == 3
    for name in ("radius", "r4"):
        ours, exported = (runs[k]["jacobian"]["2"][name] for k in runs)
        assert ours == pytest.approx(exported)
    assert runs["ouro"]["loss"] == runs["checkpoint"]["loss"]


def test_validation_data_is_cut_and_right_padding_changes_nothing(home):
    request = Request(samples=4, length=60, batch=4)
    subject = find_subject(str(home / "ouro"), request)
    assert subject.samples == 4
    (batch,) = subject.batches
    lengths = batch.samples.lengths
    assert min(lengths) < max(lengths) <= 60
    ones = find_subject(str(home / "ouro"), Request(samples=4, length=60, batch=1)).batches
    loop = subject.load()
    h = loop.turn(h0 := loop.prelude(batch.tokens), batch.samples)(h0)
    for row, alone in enumerate(ones):
        real = alone.tokens.shape[1]
        assert real == lengths[row]
        assert torch.equal(batch.tokens[row, :real], alone.tokens[0])
        h0 = loop.prelude(alone.tokens)
        expected = loop.turn(h0, alone.samples)(h0)
        torch.testing.assert_close(h[row : row + 1, :real], expected)
    assert not loop.training
    assert {(x.dtype, x.requires_grad) for x in loop.parameters()} == {(torch.float32, False)}


def test_the_last_turn_always_has_a_jacobian(home, tmp_path):
    words = ["--turns", "5", "--jacobian-at", "2", "--samples", "2", "--out", str(tmp_path)]
    assert main(["analyze", str(home / "sums"), *words]) == 0
    assert list(found_in(tmp_path)["runs"]["sums"]["jacobian"]) == ["2", "5"]


@pytest.mark.parametrize("missing", ["folder", "matplotlib", "a run"])
def test_nothing_is_measured_before_all_that_is_needed_is_there(
    home, tmp_path, capsys, monkeypatch, missing
):
    def refuse(*_):
        raise AssertionError("measured")

    monkeypatch.setattr("stars_fast.analysis.measure.measure", refuse)
    (tmp_path / "file").write_text("")
    words = ["analyze", str(home / "sums"), "--out", str(tmp_path / "new")]
    message = "figures need matplotlib"
    if missing == "folder":
        words[-1], message = str(tmp_path / "file" / "deeper"), "file/deeper can't be made"
    elif missing == "a run":
        words.insert(2, str(home))
        message = "holds no config.yaml and no config.json"
    else:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text", "chats"])
def test_samples_from_jsonl(home, tmp_path, kind):
    path = tmp_path / "rows.jsonl"
    rows = {
        "text": [{"text": "a"}, {"text": None}, {"text": "one and two are three"}],
        "chats": [{"problem": "1 + 2?", "solution": "It is 3."}, {"problem": "", "solution": "x"}],
    }[kind]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = Request(samples=5, length=100, text=str(path))
    subject = find_subject(str(home / "checkpoint"), request)
    assert subject.samples == 1
    (batch,) = subject.batches
    if kind == "text":  # all but the first are to be predicted
        assert len(batch.labels) == batch.tokens.shape[1] - 1
    else:  # what the assistant says and its end
        assert 0 < len(batch.labels) < batch.tokens.shape[1] // 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{home}", *SMALL], r"holds no config.yaml and no config.json, but .*checkpoint"),
        (
            ["{home}/sums", "--turns", "4", "--jacobian-at", "2,6"],
            r"--jacobian-at: expected at most",
        ),
        (["{home}/sums", "--turns", "1"], "--turns: expected at least 2, got 1"),
        (["{home}/sums", "--text", "x.txt"], "--text is for models of text"),
        (["{home}/sums", "--step", "9"], "has no checkpoint of step 9"),
        (["{home}/sums", "--device", "oven"], "--device: expected cpu, cuda"),
        (["{home}/checkpoint"], "checkpoint is no run folder; for a checkpoint or a hub id give"),
        (["{home}/nowhere"], "nowhere does not exist: expected a run folder"),
        (["{home}/checkpoint", "--text", "{home}/missing.txt"], "--text .*missing.txt: "),
        (["{home}/checkpoint", "--text", "{home}/empty.txt"], "no samples: no text has a token"),
        (["{home}/checkpoint", "--text", "{home}/bytes.txt"], "bytes.txt: expected text in UTF-8"),
    ],
)
def test_mistakes_are_named(home, capsys, words, message):
    (home / "empty.txt").write_text("\n\n  \n")
    (home / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    words = [word.format(home=home) for word in words]
    assert main(["analyze", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--turns", "0"], "expected a positive integer"),
        (["--tol", "2"], r"expected a number in \(0, 1\)"),
        (["--jacobian-at", "0,1"], "expected a positive integer"),
        (["--place", "end"], "invalid choice"),
    ],
)
def test_options_are_checked(capsys, words, message):
    with pytest.raises(SystemExit):
        main(["analyze", "run", *words])
    assert re.search(message, capsys.readouterr().err)
