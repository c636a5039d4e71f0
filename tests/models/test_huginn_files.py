"""Checkpoints of Huginn: read without remote code, written back key by key, or refused."""

import json
import shutil

import fresh
import pytest
import torch
from huginn_models import checkpoint, files, model, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from stars_fast.models.huginn import HuginnConfig, HuginnForCausalLM
from stars_fast.models.huginn.tiny import SHAPES, write_tiny_huginn

each_shape = pytest.mark.parametrize("shape", SHAPES)

# Fields that say nothing of the model: which code and library wrote it.
WRITTEN_ANEW = {"auto_map", "architectures", "transformers_version", "dtype", "torch_dtype"}
LAYOUTS = {"tinyllama": "llama"}


@pytest.fixture
def copy(tmp_path):
    """A checkpoint of Huginn to be spoilt."""
    return shutil.copytree(checkpoint(), tmp_path / "copy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
@each_shape
def test_every_key_and_field_comes_back(shape, shards, dtype, tmp_path):
    theirs = write_tiny_huginn(tmp_path / "theirs", shape=shape, shards=shards, dtype=dtype)
    net = HuginnForCausalLM.from_pretrained(theirs)
    assert net.dtype == dtype
    assert net.config.layer_layout == LAYOUTS.get(shape, shape)
    size = "20KB" if shards > 1 else "5GB"
    net.save_pretrained(tmp_path / "ours", max_shard_size=size)
    (weights, config), (again, fields) = files(theirs), files(tmp_path / "ours")
    assert (tmp_path / "ours" / "model.safetensors").exists() == (shards == 1)
    assert again.keys() == weights.keys()
    for key, weight in weights.items():
        assert again[key].dtype == weight.dtype, key
        if key == "freqs_cis":  # computed anew: within a rounding of fp32
            torch.testing.assert_close(again[key], weight, rtol=0, atol=1e-4)
            torch.testing.assert_close(again[key][:, :8], weight[:, :8], rtol=0, atol=1e-6)
        else:
            assert torch.equal(again[key], weight), key
    for name in config.keys() - WRITTEN_ANEW:
        assert fields[name] == config[name], name
    assert fields["dtype"] == str(dtype).removeprefix("torch.")
    assert "tie_word_embeddings" not in fields  # public readers would be given it twice
    assert fields.keys() & {"rope_theta", "rope_scaling", "rope_parameters"} == (
        config.keys() & {"rope_theta", "rope_scaling"}
    )


def test_ids_of_tokens_are_there_to_be_read(tmp_path):
    for given in ({}, {"eos_token_id": 5}):
        HuginnConfig(n_embd=32, n_heads=4, **given).save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        assert [getattr(config, name) for name in names] == [None, given.get("eos_token_id"), None]


@each_shape
def test_the_auto_classes_give_the_native_model(shape):
    folder = checkpoint(shape)
    assert type(AutoConfig.from_pretrained(folder)) is HuginnConfig
    net = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    assert type(net) is HuginnForCausalLM


def test_a_tied_head_may_be_written_too(copy):
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    net = HuginnForCausalLM.from_pretrained(copy)
    assert net.lm_head.weight is net.get_input_embeddings().weight


def spoil(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("transformer.adapter.weight"), "1 keys are missing: transformer.adapter"),
        (lambda w: w.update(more=torch.ones(1)), "1 keys are not expected: more"),
        (
            lambda w: w.update({"transformer.ln_f.weight": torch.ones(3)}),
            r"1 keys have another shape: transformer.ln_f.weight \(\[3\] in the checkpoint, \[32\]",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_weights_that_do_not_fit_are_named(change, message, copy):
    spoil(copy, change)
    with pytest.raises(ValueError, match=message):
        HuginnForCausalLM.from_pretrained(copy)


def test_another_model_is_refused(copy):
    fields = json.loads((copy / "config.json").read_text()) | {"model_type": "llama"}
    (copy / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"model_type huginn_raven .*got 'llama'"):
        HuginnForCausalLM.from_pretrained(copy)


@pytest.mark.parametrize("shape", ["huginn", "olmo2"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_hub_id_is_read_from_its_cache(shape, shards, tmp_path):
    place = tmp_path / "models--someone--tiny"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    write_tiny_huginn(place / "snapshots" / "abc", shape=shape, shards=shards)
    options = {"cache_dir": tmp_path, "local_files_only": True, "dtype": torch.float64}
    net, ids = HuginnForCausalLM.from_pretrained("someone/tiny", **options), tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(net(ids).logits, model(shape)(ids).logits)


def test_a_layout_that_is_given_is_not_guessed(copy):
    with pytest.raises(ValueError, match=r"keys are not expected: .*norm_3"):
        HuginnForCausalLM.from_pretrained(copy, layer_layout="llama")


def test_the_rotary_table_of_a_checkpoint_is_not_read(copy):
    spoil(copy, lambda w: w["freqs_cis"].zero_())
    ids = tokens(1, 5)
    with torch.no_grad():
        found = HuginnForCausalLM.from_pretrained(copy, dtype=torch.float64)(ids).logits
        assert torch.equal(found, model()(ids).logits)


IN_A_FRESH_PROCESS = """
import socket, sys
def refuse(*_): raise AssertionError("no network")
socket.socket.connect = refuse
import torch
from transformers import AutoModelForCausalLM
import stars_fast.models.huginn
net = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64)
ids, expected = torch.load(sys.argv[2])
found = net.generate(ids, turns=3, max_new_tokens=8, do_sample=False, eos_token_id=None,
                     pad_token_id=0)
assert torch.equal(found, expected), (found, expected)
"""


@pytest.mark.slow
@each_shape
def test_saved_and_loaded_in_a_fresh_process_it_says_the_same(shape, tmp_path):
    net, ids = model(shape), tokens(2, 5)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = net.generate(ids, turns=3, max_new_tokens=8, **options)
    net.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    torch.save((ids, expected), tmp_path / "expected.pt")
    fresh.said(IN_A_FRESH_PROCESS, tmp_path / "saved", tmp_path / "expected.pt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "gpt2"}, "shape: expected one of .*'gpt2'"),
        ({"vocab_size": 10}, r"vocab_size: .*10"),
        ({"shards": 0}, r"shards: .*0"),
        ({"n_embd": 0}, r"n_embd: .*0"),
        ({"hidden_size": 32}, r"config: expected fields among .*\['hidden_size'\]"),
    ],
)
def test_mistakes_in_a_tiny_checkpoint_are_named(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_tiny_huginn(tmp_path / "new", **options)


def test_a_tiny_checkpoint_overwrites_nothing(copy):
    with pytest.raises(FileExistsError, match="folder: expected a new or empty"):
        write_tiny_huginn(copy)
