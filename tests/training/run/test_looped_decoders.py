"""Decoders of several architectures trained with STARS as looped ones, judged and exported."""

import json

import pytest
import torch
from ouro_runs import rows_of

pytest.importorskip("transformers")

from decoder_models import DECODERS, decoder

from stars_fast.base.checkpoints import latest, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.base.tree import merge
from stars_fast.cli import main
from stars_fast.data.tiny_tokenizer import TINY_VOCABULARY, train_tokenizer, write_tokenizer
from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM
from stars_fast.training.config import config_from, load_config, save_config
from stars_fast.training.run.trainer import train

pytestmark = pytest.mark.slow

RUN = {
    "method": "stars",
    "precision": "float32",
    "depth": {"law": "lognormal", "mu": 0.7, "sigma": 0.4, "high": 4},
    "optim": {"lr": 5e-3, "weight_decay": 0.0, "schedule": "wsd", "decay_steps": 0},
    "train": {
        "steps": 50, "batch_size": 8, "log_every": 1, "save_every": 0, "threads": 1,
        "report_to": [],
    },
    "data": {"kind": "text", "length": 24, "validation": 4},
    "eval": {"turns": [1, 3]},
}  # fmt: skip
LOOPS = [
    {},
    {"injection": "add"},
    {"injection": "adapter"},
    {"injection": "adapter", "state": "noise", "norm_between": True},
    {"injection": "add", "state": "learned"},
    {"layers": [0, 1, 3]},
]


@pytest.fixture
def folder_of(tmp_path):
    """folder_of(name) -> a checkpoint of that decoder with a tokenizer."""

    def make(name):
        folder = tmp_path / "decoders" / name
        if not folder.exists():
            decoder(name, torch.float32).save_pretrained(folder)
            write_tokenizer(folder, train_tokenizer(TINY_VOCABULARY), 256)
        return folder

    return make


@pytest.fixture
def run_of(tmp_path, folder_of):
    """run_of(name, out, **changes) -> the configuration of a run in tmp_path/out."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The sum of {i} and {i + 3} is {2 * i + 3}. " for i in range(60)))

    def make(name, out="run", **changes):
        model = {"family": "looped_decoder", "path": str(folder_of(name))}
        place = {"out": str(tmp_path / out), "model": model, "data": {"source": str(text)}}
        return config_from(merge(merge(RUN, place), changes))

    return make


@pytest.mark.parametrize(("name", "loop"), zip(DECODERS, LOOPS, strict=True))
def test_stars_lowers_the_loss(run_of, name, loop):
    folder = train(run_of(name, model=loop)).folder
    rows = rows_of(folder)
    losses = [row["loss"] for row in rows]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert rows[-1]["penalty"] > 0  # an adapter that starts without the state has none at first
    judged = json.loads((folder / "results.json").read_text())["validation_loss"]
    assert list(judged) == ["1", "3"]


@pytest.mark.parametrize(
    "changes",
    [
        {"penalty": {"at": "last", "detach": False}},
        {"penalty": {"fraction": 0.5}},
        {"penalty": {"at": "last", "detach": False, "fraction": 0.5}},
        {"memory": {"recompute": "layer"}},
        {"train": {"backprop_turns": 1, "accumulation": 2}},
        {"precision": "mixed"},
        {"precision": "bfloat16"},
    ],
)
def test_the_options_of_a_step_hold_with_an_injection(run_of, changes):
    loop = {"injection": "adapter", "state": "learned"}
    short = {"train": {"steps": 12}}
    folder = train(run_of("gpt2", model=loop, **merge(short, changes))).folder
    losses = [row["loss"] for row in rows_of(folder)]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_recomputed_layers_change_nothing(run_of):
    ends = []
    for how in ("none", "turn", "layer"):
        changes = {"memory": {"recompute": how}, "train": {"steps": 4}}
        folder = train(run_of("qwen3", how, model={"injection": "adapter"}, **changes)).folder
        ends.append(saved_tensors(latest(folder / "checkpoints")))
    for other in ends[1:]:
        for name, tensor in ends[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_are_one(run_of, launch, tmp_path, kind):
    """Tied weights too: Gemma's head is its embedding."""
    config = run_of("gemma3", "one", model={"injection": "adapter"}, train={"steps": 3})
    save_config(config, tmp_path / "recipe.yaml")
    command = ["-m", "stars_fast.cli", "train", str(tmp_path / "recipe.yaml")]
    words = ["--parallel.kind", kind, "--out", str(tmp_path / "two")]
    assert launch([*command, *words], 2) == [0, 0]
    one, two = rows_of(train(config).folder), rows_of(tmp_path / "two")
    for mine, theirs in zip(one, two, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["penalty"] == pytest.approx(theirs["penalty"], rel=1e-4)


def test_a_run_resumes_bit_for_bit(run_of):
    loop = {"injection": "adapter", "state": "noise"}
    folder = train(run_of("gpt2", model=loop, train={"steps": 8})).folder
    half = run_of("gpt2", "half", model=loop, train={"steps": 4})
    train(half)
    again = train(load_config(str(half.out), ["--steps", "8"]), resume=True).folder
    ends = [saved_tensors(latest(each / "checkpoints")) for each in (folder, again)]
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


def test_a_run_is_evaluated_analysed_exported_and_gone_on_from(run_of, tmp_path, capsys):
    folder = train(run_of("mistral", model={"injection": "adapter"}, train={"steps": 3})).folder
    out = str(tmp_path / "out")
    text = ["--text", str(tmp_path / "text.txt"), "--turns", "1,3", "--length", "32"]
    assert main(["eval", str(folder), *text, "--out", out]) == 0
    losses = json.loads((tmp_path / "out" / "text-loss.json").read_text())["models"]
    small = ["--samples", "3", "--turns", "4", "--jacobian-at", "4"]
    assert main(["analyze", str(folder), *small, "--out", out]) == 0
    exported = tmp_path / "exported"
    assert main(["export", str(folder), str(exported), "--turns", "3"]) == 0
    assert main(["eval", str(exported), *text, "--out", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again" / "text-loss.json").read_text())["models"]
    assert list(again.values()) == list(losses.values())
    model = LoopedDecoderForCausalLM.from_pretrained(exported)
    assert (model.config.total_ut_steps, model.config.injection) == (3, "adapter")

    same = {"injection": "adapter", "adapter_start": "state"}  # it says what the folder leaves open
    changes = {"model": {"path": str(exported), **same}, "train": {"steps": 2}}
    further = train(run_of("mistral", "further", **changes)).folder
    assert rows_of(further)[0]["loss"] < rows_of(folder)[0]["loss"]
    with pytest.raises(
        ConfigError, match=r"model\.injection: expected to be left out .* with adapter"
    ):
        train(run_of("mistral", "other", **merge(changes, {"model": {"injection": "add"}})))
    with pytest.raises(ConfigError, match=r"model\.adapter_start: .* looped with state, got inpu"):
        train(run_of("mistral", "third", **merge(changes, {"model": {"adapter_start": "inputs"}})))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"block": 9}, "counts that make up the 4 layers"),
        ({"layers": [0, 7]}, r"different layers among 0 to 3, got \[0, 7\]"),
        ({"injection": "concat"}, "model.injection: expected one of none.add.adapter"),
        ({"state": "noise"}, "expected add or adapter with state 'noise'"),
        ({"attention": "flash_attention_2"}, "attention: expected sdpa, eager or none"),
        ({"path": "nowhere/to/be/found"}, "nowhere/to/be/found"),
    ],
)
def test_mistakes_are_named(run_of, model, message):
    with pytest.raises(ConfigError, match=message):
        train(run_of("llama", model=model))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"adapter_start": "inputs", "injection": "none"}, "adapter_start: expected none with inj"),
        ({"state": "noise", "injection": "none"}, "expected add or adapter with state 'noise'"),
    ],
)
def test_a_loop_of_the_package_s_own_decoder_is_checked_before_a_run(model, message):
    with pytest.raises(ConfigError, match=message):
        load_config("looped-tiny", [f"--model.{name}={value}" for name, value in model.items()])
