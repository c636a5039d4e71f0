"""Runs that go on where their model lies elsewhere (`model.path`), and what may not differ."""

import json
import shutil
from dataclasses import replace

import pytest
from ouro_runs import TINY, ouro_run, rows_of

pytest.importorskip("transformers")

import torch
from decoder_models import decoder

from stars_fast.base.checkpoints import latest, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.base.tree import merge
from stars_fast.data.tiny_tokenizer import TINY_VOCABULARY, train_tokenizer, write_tokenizer
from stars_fast.models.huginn.tiny import write_tiny_huginn
from stars_fast.models.ouro.tiny import write_tiny_ouro
from stars_fast.training.config import config_from
from stars_fast.training.run.trainer import train

pytestmark = pytest.mark.slow


def write_decoder(folder):
    """A Llama, of which a run makes a looped decoder."""
    decoder("llama", torch.float32).save_pretrained(folder)
    write_tokenizer(folder, train_tokenizer(TINY_VOCABULARY), 256)


STEPS = {"steps": 2, "save_every": 1}
FAMILIES = {
    "ouro": lambda folder: write_tiny_ouro(folder, hidden_size=32, intermediate_size=64),
    "huginn": lambda folder: write_tiny_huginn(folder),
    "looped_decoder": write_decoder,
}


@pytest.fixture(params=list(FAMILIES))
def begun(request, tmp_path):
    """A run of two steps of which one is done, and the folder of its model."""
    model = tmp_path / "model"
    FAMILIES[request.param](model)
    given = {k: v for k, v in TINY.items() if k != "task"}
    given["model"] = {"family": request.param, "path": str(model)}
    data = {"kind": "chats", "cache": str(tmp_path / "cache")}
    config = config_from(merge(given, {"out": str(tmp_path / "run"), "data": data, "train": STEPS}))
    train(replace(config, train=replace(config.train, steps=1)))
    return config, model


def elsewhere(config, path):
    return replace(config, model=replace(config.model, path=str(path)))


def files_of(folder):
    """Every file of a run with its text, but for those of who owned it."""
    found = (each for each in folder.rglob("*") if each.is_file() and ".claims" not in each.parts)
    return {str(each): each.read_bytes() for each in found}


def test_a_run_goes_on_where_its_model_lies_now(begun, tmp_path):
    config, model = begun
    moved = tmp_path / "moved"
    whole = train(replace(config, out=str(tmp_path / "whole"))).folder
    model.rename(moved)
    folder = train(elsewhere(config, moved), resume=True).folder
    assert rows_of(folder) == rows_of(whole)
    one, two = (saved_tensors(latest(each / "checkpoints")) for each in (folder, whole))
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_another_model_there_is_refused(begun, tmp_path):
    config, model = begun
    other = tmp_path / "other"
    shutil.copytree(model, other)
    fields = json.loads((other / "config.json").read_text())
    norm = "norm_eps" if "norm_eps" in fields else "rms_norm_eps"
    (other / "config.json").write_text(json.dumps(fields | {norm: 1e-3}))
    before = files_of(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"model\.path: expected the model of the run in .*run, "):
        train(elsewhere(config, other), resume=True)
    assert files_of(tmp_path / "run") == before


def test_adapters_hold_to_their_base(tmp_path):
    pytest.importorskip("peft")
    for seed, name in enumerate(("base", "moved", "other")):
        write_tiny_ouro(tmp_path / name, seed=seed // 2)
    config = ouro_run(
        tmp_path / "run", tmp_path / "cache", model={"path": str(tmp_path / "base")},
        lora={"rank": 2}, train=STEPS,
    )  # fmt: skip
    train(replace(config, train=replace(config.train, steps=1)))
    with pytest.raises(ConfigError, match=r"weights that the adapters of .* were trained on are"):
        train(elsewhere(config, tmp_path / "other"), resume=True)
    folder = train(elsewhere(config, tmp_path / "moved"), resume=True).folder
    assert [row["step"] for row in rows_of(folder)] == [1, 2]
