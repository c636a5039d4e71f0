"""A family of models and a kind of data go together without a task of their own."""

import json

import pytest
import torch
from ouro_runs import rows_of

from stars_fast.base.checkpoints import latest, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.base.tree import merge
from stars_fast.cli import main
from stars_fast.training.config import config_from, load_config
from stars_fast.training.run.trainer import train

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

RUN = {
    "method": "stars",
    "precision": "float32",
    "depth": {"law": "lognormal", "mu": 0.7, "sigma": 0.4, "high": 4},
    "optim": {"lr": 1e-2, "weight_decay": 0.0, "schedule": "wsd", "decay_steps": 0},
    "train": {
        "steps": 30, "batch_size": 8, "log_every": 1, "save_every": 0, "threads": 1,
        "report_to": [],
    },
    "eval": {"turns": [1, 3]},
}  # fmt: skip
LOOPED = {"family": "looped_lm", "d_model": 32, "n_heads": 2, "d_ff": 64}
HUGINN = {"family": "huginn", "path": "tiny", "width": 32, "layers": 1}
OURO = {"family": "ouro", "path": "tiny", "width": 32, "layers": 1}
SUMS = {"kind": "sums", "digits": 1, "train_samples": 60, "test_samples": 21}
CHATS = {
    "kind": "chats", "source": "tiny-chat", "samples": 60, "validation": 8, "max_length": 96,
    "system": None, "workers": 1,
}  # fmt: skip
TEXT = {"kind": "text", "length": 24, "validation": 4}
PAIRS = {
    "looped_lm-chats": (LOOPED, {**CHATS, "packing": False}),
    "looped_lm-text": (LOOPED, TEXT),
    "huginn-chats": (HUGINN, {**CHATS, "packing": False}),
    "huginn-sums": (HUGINN, SUMS),
    "ouro-sums": (OURO, SUMS),
    "ouro-text": (OURO, TEXT),
}


@pytest.fixture
def run_of(tmp_path, tmp_path_factory):
    """run_of(pair, name, **changes) -> the configuration of a run in tmp_path/name."""

    def make(pair, name="run", **changes):
        model, data = PAIRS[pair]
        if data["kind"] == "chats":
            data = {**data, "cache": str(tmp_path_factory.getbasetemp() / "chats")}
        if data["kind"] == "text":
            text = tmp_path / "text.txt"
            text.write_text(
                "".join(f"The sum of {i} and {i + 3} is {2 * i + 3}. " for i in range(60))
            )
            data = {**data, "source": str(text)}
        place = {"out": str(tmp_path / name), "name": name, "model": model, "data": data}
        return config_from(merge(merge(RUN, place), changes))

    return make


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_trains_resumes_and_is_judged(run_of, pair):
    folder = train(run_of(pair)).folder
    losses = [row["loss"] for row in rows_of(folder)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    metric = "accuracy" if pair.endswith("sums") else "validation_loss"
    judged = json.loads((folder / "results.json").read_text())[metric]
    assert list(judged) == ["1", "3"]

    train(run_of(pair, "again", train={"steps": 12}))
    longer = load_config(str(run_of(pair, "again").out), ["--steps", "30"])
    again = train(longer, resume=True).folder
    ends = [saved_tensors(latest(each / "checkpoints")) for each in (folder, again)]
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
    assert rows_of(again) == rows_of(folder)
    assert json.loads((again / "results.json").read_text())[metric] == judged


def test_text_goes_on_where_it_lies_now_and_is_the_same(run_of, tmp_path):
    config = run_of("ouro-text", train={"steps": 2})
    train(config)
    moved = (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    words = ["--steps", "3", "--data.source", str(moved)]
    assert train(load_config(config.out, words), resume=True).step == 3
    text = moved.read_text()
    for changed, name in ((f"Now {text}", "training"), (f"{text[:-2]}!", "held-out")):
        moved.write_text(changed)
        with pytest.raises(ConfigError, match=rf"the {name} data are not those"):
            train(load_config(config.out), resume=True)


def test_ouro_on_sums_is_evaluated_analysed_and_exported(run_of, tmp_path, capsys):
    folder = train(run_of("ouro-sums", train={"steps": 2})).folder
    judged = json.loads((folder / "results.json").read_text())["accuracy"]
    out = str(tmp_path / "out")
    assert main(["eval", str(folder), "--turns", "1,3", "--tol", "0.1", "--out", out]) == 0
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["accuracy"][str(folder)] == judged
    small = ["--samples", "3", "--turns", "4", "--jacobian-at", "4"]
    assert main(["analyze", str(folder), *small, "--out", out]) == 0
    assert "unseen 1-digit sums" in (tmp_path / "out" / "analysis.json").read_text()
    assert main(["export", str(folder), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "tokenizer.json").exists()


def test_a_looped_lm_on_chats_is_analysed_and_exported(run_of, tmp_path):
    folder = train(run_of("looped_lm-chats", train={"steps": 2})).folder
    out = str(tmp_path / "out")
    small = ["--samples", "3", "--turns", "4", "--jacobian-at", "4"]
    assert main(["analyze", str(folder), *small, "--out", out]) == 0
    assert main(["export", str(folder), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("model", "data", "changes", "message"),
    [
        (LOOPED, CHATS, {}, "data.packing: expected false with model.family looped_lm"),
        (
            {**LOOPED, "vocab_size": 100}, {**CHATS, "packing": False}, {},
            "model.vocab_size: expected at least the .* tokens of model.tokenizer tiny, got 100",
        ),
        (
            {**LOOPED, "max_length": 20}, {**CHATS, "packing": False}, {},
            "model.max_length: expected at least 96 for the data, got 20",
        ),
        (
            {**LOOPED, "tokenizer": None}, {**CHATS, "packing": False}, {},
            "model.tokenizer: expected a hub id, a folder or tiny for text",
        ),
        ({**LOOPED, "vocab_size": 9}, SUMS, {}, "model.vocab_size: expected at least 14 for"),
        (
            LOOPED, {**CHATS, "packing": False}, {"eval": {"tasks": ["gsm8k"]}},
            "eval.tasks: expected none with model.family looped_lm",
        ),
        (OURO, SUMS, {"parallel": {"kind": "fsdp"}}, "parallel.kind: expected auto or ddp"),
        ({"family": "gpt9"}, SUMS, {}, "one of huginn, looped_decoder, looped_lm, ouro, got"),
        (OURO, {"kind": "poems"}, {}, "of chats, parity, sums, text, got 'poems'"),
        (OURO, {**TEXT, "source": "nowhere.txt"}, {}, "data.source: expected a text file or"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(tmp_path, model, data, changes, message):
    mapping = {**RUN, "out": str(tmp_path / "run"), "model": model, "data": data}
    with pytest.raises(ConfigError, match=message):
        train(config_from(merge(mapping, changes)))


def test_a_task_is_short_for_its_pair():
    both = [load_config("ouro-tiny"), load_config("ouro-tiny", ["--task", "ouro"])]
    assert both[0] == both[1]
    assert (both[0].model.family, both[0].data.kind) == ("ouro", "chats")
    quick = load_config("addition-quick")
    assert (quick.model.family, quick.data.kind) == ("looped_lm", "sums")


def test_a_section_of_another_family_or_kind_begins_anew():
    words = ["--model.family", "looped_lm", "--d_model", "48", "--n_heads", "4"]
    config = load_config("ouro-tiny", [*words, "--data.packing", "false"])
    assert (config.model.d_model, config.model.tokenizer) == (48, "tiny")
    assert config.model.max_length == config.data.max_length == 192
    words = ["--data.kind", "sums", "--digits", "2", "--model.path", "tiny"]
    config = load_config("ouro-tiny", words)
    assert (config.data.digits, config.model.path) == (2, "tiny")
    assert config.eval.turns == load_config("ouro-tiny").eval.turns
    with pytest.raises(ConfigError, match=r"unknown field .*d_model"):
        load_config("ouro-tiny", ["--d_model", "48"])


def test_a_run_of_before_says_its_task_alone(tiny_in, tmp_path):
    folder = train(tiny_in(tmp_path / "run", train={"steps": 2})).folder
    text = (folder / "config.yaml").read_text()
    old = text.replace("  family: looped_lm\n", "").replace("  kind: sums\n", "")
    assert len(old) < len(text)
    (folder / "config.yaml").write_text("task: addition\n" + old)
    assert train(load_config(str(folder), ["--steps", "4"]), resume=True).step == 4
    assert main(["eval", str(folder), "--turns", "1"]) == 0
