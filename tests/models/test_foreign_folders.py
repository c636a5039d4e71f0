"""What is given as a model and holds none is named, with the way out."""

import json
import re

import pytest
import torch
from ouro_models import checkpoint, model

from stars_fast.cli import main
from stars_fast.models.folders import check_exists, check_folder
from stars_fast.models.ouro import OuroForCausalLM

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "ByteDance/Ouro-1.4B"}


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


OURO = {"config__json": {"model_type": "ouro"}}
FOLDERS = {
    "adapter": (
        {"adapter_config__json": ADAPTER, "adapter_model__safetensors": ""},
        "holds a PEFT adapter of ByteDance/Ouro-1.4B .*merge it into its base model first",
    ),
    "adapter-beside-weights": (
        {**OURO, "adapter_config__json": {}, "model__safetensors": ""},
        "holds a PEFT adapter .*not a whole model: merge it",
    ),
    "empty": ({}, "is an empty folder: expected a run folder"),
    "gguf": ({"model-q4__gguf": ""}, "holds GGUF weights"),
    "gguf-with-config": ({**OURO, "model-q4__gguf": ""}, "no weights: GGUF files can't be read"),
    "tokenizer": ({"tokenizer__json": {}}, "holds a tokenizer alone, no config.json"),
    "weights": ({"model__safetensors": ""}, "holds weights without a config.json"),
    "config": (OURO, "has a config.json and no weights"),
    "llama": ({"config__json": {"model_type": "llama"}}, "is no Ouro model: .*got 'llama'"),
    "shards": (
        {**OURO, "model__safetensors__index__json": {"weight_map": {"a": "1.st", "b": "2.st"}}},
        "lacks 2 of the 2 shards that model.safetensors.index.json names: 1.st, 2.st",
    ),
    "broken": ({"config__json": "{"}, "config.json: can't be read as JSON in UTF-8"),
    "list": ({"config__json": []}, "config.json: expected a mapping, got list"),
    "notes": ({"notes__txt": "x"}, r"holds no config.yaml and no config.json \(notes.txt\)"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_a_folder_holds_instead_of_a_model_is_said(tmp_path, kind):
    files, message = FOLDERS[kind]
    folder = write(tmp_path / kind, **files)
    with pytest.raises(ValueError, match=rf"{folder}.*{message}"):
        check_folder(folder)
    with pytest.raises(ValueError, match=message):
        OuroForCausalLM.from_pretrained(folder)


def test_of_models_in_a_folder_one_is_to_be_given(tmp_path):
    write(tmp_path / "out" / "checkpoint-5", **OURO)
    with pytest.raises(ValueError, match="but checkpoint-5 in it: give one of these"):
        check_folder(tmp_path / "out")


def test_a_run_is_no_checkpoint(tmp_path):
    write(tmp_path / "run" / "model", **OURO)
    write(tmp_path / "run", config__yaml="task: ouro")
    with pytest.raises(ValueError, match=rf"write one with stars-fast export {tmp_path}/run DIR"):
        OuroForCausalLM.from_pretrained(tmp_path / "run")


def test_lm_eval_is_told_too(tmp_path):
    pytest.importorskip("lm_eval")
    from stars_fast.evaluation.lm_model import StarsFastLM

    files, message = FOLDERS["adapter"]
    with pytest.raises(ValueError, match=message):
        StarsFastLM(str(write(tmp_path / "adapter", **files)))
    with pytest.raises(ValueError, match="nowhere does not exist"):
        StarsFastLM(str(tmp_path / "nowhere"))


def test_a_name_that_neither_the_disk_nor_the_hub_knows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for words in (["export", "nope", "out"], ["eval", "nope", "--tasks", "gsm8k"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "nope does not exist here and can't be loaded from the hub" in said
        assert said.count("\n") == 1


def test_a_checkpoint_of_a_run_is_not_the_run(tmp_path):
    inner = write(tmp_path / "run" / "checkpoints" / "step-000040", __metadata="")
    with pytest.raises(ValueError, match=rf"give the run folder, {tmp_path}/run, and --step 40"):
        check_folder(inner)


COMMANDS = ["export", "eval", "text", "tasks", "analyze", "train"]
UNDERSTOOD = ("export", "text", "tasks", "analyze")
"""Commands that know an adapter from a model; its base is not there."""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["adapter", "empty"])
def test_every_command_says_it(tmp_path, capsys, command, kind):
    files, message = FOLDERS[kind]
    if kind == "adapter":
        files = {**files, "adapter_config__json": {**ADAPTER, "base_model_name_or_path": "runs/a"}}
        message = message.replace("ByteDance/Ouro-1.4B", "runs/a")
        if command in UNDERSTOOD:
            message = "adapter: the base model of the adapter: runs/a does not exist: expected"
        elif command == "eval":
            message = "adapter is not a run folder: it has no config.yaml"
    folder = str(write(tmp_path / kind, **files))
    (tmp_path / "a.txt").write_text("one")
    words = {
        "export": ["export", folder, str(tmp_path / "new")],
        "eval": ["eval", folder],
        "text": ["eval", folder, "--text", str(tmp_path / "a.txt"), "--out", str(tmp_path)],
        "tasks": ["eval", folder, "--tasks", "gsm8k", "--out", str(tmp_path)],
        "analyze": ["analyze", folder, "--text", str(tmp_path / "a.txt")],
        "train": ["train", "ouro-tiny", "--model.path", folder, "--out", str(tmp_path / "run")],
    }[command]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message.split(" .*")[0] in said
    assert said.count("\n") == 1 or command == "train"


@pytest.mark.parametrize("recipe", ["ouro-tiny", "looped-tiny", "huginn-tiny"])
def test_a_plan_names_the_sizes_that_a_checkpoint_does_not_say(tmp_path, capsys, recipe):
    folder = str(write(tmp_path / "odd", config__json={"vocab_size": 7}))
    assert main(["plan", recipe, "--model.path", folder, "--gpus", "H200"]) == 2
    said = capsys.readouterr().err
    assert re.search(rf"model.path {folder}: no \w+, .* in config.json\n$", said)


def test_what_is_not_there_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "one", config__yaml="")
    for path in ("runs/nope", "./nope", "/nope/at/all", "~/nope-at-all", "mine/nope"):
        write(tmp_path / "mine" / "other", config__yaml="")
        with pytest.raises(ValueError, match=f"{path} does not exist: expected a run folder"):
            check_exists(path)
    for path in ("ByteDance/Ouro-1.4B", "gpt2"):  # the hub is asked for these
        check_exists(path)
    assert main(["export", "runs/nope", "out"]) == 2
    said = capsys.readouterr().err
    assert "runs/nope does not exist" in said
    assert "there is runs/one" in said
    assert "addition" not in said
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file: expected a run folder"):
        check_exists("file")


def test_a_sharded_checkpoint_is_whole(tmp_path):
    net = model(torch.float32)
    net.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    again = OuroForCausalLM.from_pretrained(tmp_path / "shards")
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    check_folder(checkpoint())
