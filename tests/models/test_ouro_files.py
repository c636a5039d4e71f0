"""Ouro checkpoints: strict loading, exact rotary frequencies, export in the public layout, and the
same tokens in a fresh offline process."""

import json
import shutil

import fresh
import pytest
import torch
from ouro_models import checkpoint, greedy, model, tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from stars_fast.cli import main
from stars_fast.models.export import export_run
from stars_fast.models.families.ouro import FAMILY
from stars_fast.models.ouro import OuroConfig, OuroForCausalLM, OuroModel
from stars_fast.training.run.checkpoint import Checkpoints
from stars_fast.training.scale.distributed import World

LAYER_KEYS = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj "
    "mlp.down_proj input_layernorm input_layernorm_2 post_attention_layernorm "
    "post_attention_layernorm_2"
)


def public_keys(layers):
    """The keys of a published checkpoint, which vLLM's `OuroForCausalLM` reads."""
    keys = {f"model.layers.{i}.{k}.weight" for i in range(layers) for k in LAYER_KEYS.split()}
    rest = "embed_tokens.weight norm.weight early_exit_gate.weight early_exit_gate.bias"
    return keys | {f"model.{name}" for name in rest.split()} | {"lm_head.weight"}


def keys_of(folder):
    found = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that may be damaged."""
    return shutil.copytree(checkpoint(), tmp_path / "copy")


def damage(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same(mine, expected, tolerance=1e-12):
    """But for the rounding that the alignment of weights in memory makes."""
    torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


# -- loading


def test_the_auto_classes_give_the_native_model():
    config = AutoConfig.from_pretrained(checkpoint())
    assert type(config) is OuroConfig
    assert type(AutoModel.from_config(config)) is OuroModel
    body = AutoModel.from_pretrained(checkpoint(), dtype=torch.float64)
    assert type(body) is OuroModel
    expected = model().model(tokens(1, 4)).last_hidden_state
    assert_same(body(tokens(1, 4)).last_hidden_state, expected)
    assert type(AutoModelForCausalLM.from_pretrained(checkpoint())) is OuroForCausalLM


def test_missing_keys_are_named(copy):
    damage(copy, lambda w: [w.pop("model.layers.1.mlp.up_proj.weight"), w.pop("lm_head.weight")])
    message = r"2 keys are missing: lm_head.weight, model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=message):
        OuroForCausalLM.from_pretrained(copy)


def test_unexpected_keys_are_named(copy):
    damage(copy, lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    message = "1 keys are not expected: model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(ValueError, match=message):
        OuroForCausalLM.from_pretrained(copy)


def test_shapes_that_do_not_fit_are_named(copy):
    damage(copy, lambda w: w.update({"model.norm.weight": torch.ones(16)}))
    message = r"1 keys have another shape: model.norm.weight \(\[16\] in the checkpoint, \[32\]"
    with pytest.raises(ValueError, match=message):
        OuroForCausalLM.from_pretrained(copy)


def test_a_missing_gate_is_an_error_unless_it_is_ignored(copy):
    damage(copy, lambda w: [w.pop(f"model.early_exit_gate.{n}") for n in ("weight", "bias")])
    with pytest.raises(ValueError, match=r"2 keys are missing: model\.early"):
        OuroForCausalLM.from_pretrained(copy)
    net = OuroForCausalLM.from_pretrained(copy, gate="ignored", dtype=torch.float64)
    assert_same(net(tokens(1, 3)).logits, model()(tokens(1, 3)).logits)


@pytest.mark.parametrize(
    "way", ["plain", "bfloat16", "device map", "from config", "rope parameters"]
)
def test_rotary_frequencies_are_exact(way):
    exact = 1e6 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    if way == "from config":
        net = OuroForCausalLM(OuroConfig.from_pretrained(checkpoint())).to(torch.bfloat16)
    elif way == "rope parameters":
        rope = (("rope_type", "default"), ("rope_theta", 1e6))
        net = OuroForCausalLM.from_pretrained(checkpoint(), rope_parameters=dict(rope))
    else:
        options = {
            "plain": {}, "bfloat16": {"dtype": torch.bfloat16}, "device map": {"device_map": "cpu"},
        }[way]  # fmt: skip
        net = OuroForCausalLM.from_pretrained(checkpoint(), **options)
    assert torch.equal(net.model.rotary.frequencies, exact)
    assert not list(net.buffers())
    cos, sin = net.model.rotary(torch.tensor([[0, 1, 4095]]), net.dtype)
    assert cos.dtype == torch.float32
    angle = (4095 * exact).float()
    torch.testing.assert_close(cos[0, 2, :4], angle.cos(), rtol=0, atol=3e-4)
    torch.testing.assert_close(sin[0, 2, 4:], angle.sin(), rtol=0, atol=3e-4)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_scaled_rotary_is_that_of_transformers(kind):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind != "linear":
        rope["original_max_position_embeddings"] = 64
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 256}
    config = OuroConfig(num_hidden_layers=1, rope_parameters=dict(rope), **sizes)
    theirs = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=dict(rope), **sizes))
    positions = torch.arange(200)[None]
    from stars_fast.models.ouro.rotary import Rotary

    for mine, other in zip(
        Rotary(config)(positions, torch.float32), theirs(torch.zeros(1), positions), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_scaled_rotary_comes_back_from_a_checkpoint(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind != "linear":
        rope["original_max_position_embeddings"] = 64
    net = OuroForCausalLM.from_pretrained(checkpoint(), rope_parameters=rope, dtype=torch.float64)
    net.save_pretrained(tmp_path)
    again = OuroForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_same(again(tokens(1, 9)).logits, net(tokens(1, 9)).logits)
    assert not torch.allclose(net(tokens(1, 9)).logits, model()(tokens(1, 9)).logits)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_scaling"]["rope_type"] == kind
    assert written["rope_theta"] == 1e4


def test_both_forms_of_the_rotary_settings():
    older = OuroConfig(rope_theta=5e4, rope_scaling={"type": "linear", "factor": 2.0})
    newer = OuroConfig(rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0})
    assert older.rope_parameters == newer.rope_parameters
    assert OuroConfig(**older.to_dict()).rope_parameters == older.rope_parameters
    loaded = OuroConfig.from_pretrained(checkpoint(), rope_theta=3e4)
    assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": 3e4}
    scaling = {"rope_type": "linear", "factor": 2.0}
    loaded = OuroConfig.from_pretrained(checkpoint(), rope_scaling=scaling)
    assert loaded.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    with pytest.raises(ValueError, match="rope_theta: expected that of rope_parameters"):
        OuroConfig(rope_parameters={"rope_theta": 1e6}, rope_theta=1e4)
    with pytest.raises(ValueError, match="rope_scaling: expected rope_parameters"):
        OuroConfig(rope_parameters={"rope_theta": 1e6}, rope_scaling=scaling)
    with pytest.raises(ValueError, match="rope_parameters: expected rope_type and rope_theta"):
        OuroForCausalLM.from_pretrained(checkpoint(), rope_parameters={"factor": 2.0})


def test_rotary_that_changes_with_the_length_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = OuroConfig(num_hidden_layers=1, hidden_size=32, rope_parameters=rope)
    with pytest.raises(ValueError, match="expected rope_type default, linear, yarn or llama3"):
        OuroModel(config)


def test_generation_stops_at_the_end_of_a_chat_turn(copy):
    settings = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # as published
    (copy / "generation_config.json").write_text(json.dumps(settings))
    net = OuroForCausalLM.from_pretrained(copy, dtype=torch.float64)
    assert net.generation_config.eos_token_id == [2, 0]
    with torch.no_grad():  # <|im_end|> is what the model says
        net.lm_head.weight[2] = 0
        h = net.model(tokens(1, 4)).last_hidden_state[0, -1]
        net.lm_head.weight[2] = 10 * h
    out = net.generate(tokens(1, 4), max_new_tokens=9, do_sample=False)
    assert out[0, 4:].tolist() == [2]


# -- saving


FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import stars_fast.models.ouro
folder, turns = sys.argv[1:]
net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
assert net.config.total_ut_steps == int(turns), net.config.total_ut_steps
tokenizer = AutoTokenizer.from_pretrained(folder)
chat = [{"role": "user", "content": "What is 3 plus 4?"}]
ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
ids = ids if torch.is_tensor(ids) else ids["input_ids"]
out = net.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
print(out[0].tolist())
"""


def in_a_fresh_process(folder, turns):
    """Tokens of a greedy answer, by a process that can't reach a hub."""
    return json.loads(fresh.said(FRESH, folder, turns).splitlines()[-1])


def greedy_answer(net, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 3 plus 4?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt").input_ids
    return [*ids[0].tolist(), *greedy(net, ids, new=12)[0].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_saved_and_loaded_in_a_fresh_process_it_says_the_same(tmp_path, shard):
    net = model(num_key_value_heads=2, total_ut_steps=3)
    net.config.turns = 5
    folder = tmp_path / "saved"
    net.save_pretrained(folder, max_shard_size=shard)
    AutoTokenizer.from_pretrained(checkpoint()).save_pretrained(folder)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "40KB")
    assert in_a_fresh_process(folder, 5) == greedy_answer(net, folder)


def test_shards_take_the_place_of_the_one_file_of_an_earlier_save(tmp_path):
    net = model(torch.float32)
    net.save_pretrained(tmp_path)
    with torch.no_grad():
        net.lm_head.weight.mul_(2)
    net.save_pretrained(tmp_path, max_shard_size="40KB")
    again = OuroForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, net.lm_head.weight)
    net.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_the_saved_layout_is_the_public_one(tmp_path):
    net = model(torch.bfloat16, total_ut_steps=6)
    net.save_pretrained(tmp_path)
    assert keys_of(tmp_path) == public_keys(2) == keys_of(checkpoint())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["OuroForCausalLM"]
    assert config["model_type"] == "ouro"
    assert config["total_ut_steps"] == 6
    assert config["rope_theta"] == 1e6
    assert config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert config["dtype"] == "bfloat16"
    assert "auto_map" not in config
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert generation["pad_token_id"] == 0


def test_what_vllms_loader_needs_is_there(tmp_path):
    """vLLM's `OuroForCausalLM` (vllm/model_executor/models/ouro.py): the fields of the config that
    it reads, silu alone, one window for all layers or none, and these names, of which it stacks
    q, k, v and gate, up."""
    model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    read = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads hidden_act rms_norm_eps max_position_embeddings rope_parameters "
        "total_ut_steps tie_word_embeddings"
    )
    assert set(read.split()) <= set(config)
    assert config["hidden_act"] == "silu"
    assert config["max_window_layers"] == config["num_hidden_layers"]
    weights = load_file(tmp_path / "model.safetensors")
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    assert set(weights) == public_keys(layers)
    stacked = [weights[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.cat(stacked).shape == (3 * width, width)


# -- export


def save(folder, step, net):
    """A checkpoint of a run, as the trainer writes it."""
    store = Checkpoints(folder / "checkpoints", World(0, 1, torch.device("cpu")))
    store.save(step, net, torch.optim.AdamW(net.parameters()), {"step": step})
    store.wait()


@pytest.fixture
def run(tmp_path):
    """A run folder as the trainer writes it: a base and two checkpoints."""
    net, folder = model(torch.float32), tmp_path / "run"
    FAMILY.keep(net, AutoTokenizer.from_pretrained(checkpoint()), folder / "model")
    for step in (3, 7):
        with torch.no_grad():
            net.lm_head.weight.mul_(2)
        save(folder, step, net)
    return folder, net


@pytest.mark.slow
def test_an_exported_run_is_a_model(run, tmp_path, capsys):
    folder, net = run
    out = tmp_path / "out"
    assert main(["export", str(folder), str(out), "--turns", "8"]) == 0
    assert f"written: {out}" in capsys.readouterr().out
    net = net.double()
    net.config.turns = 8
    assert in_a_fresh_process(out, 8) == greedy_answer(net, out)
    files = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= files
    exported, original = (AutoTokenizer.from_pretrained(x) for x in (out, checkpoint()))
    assert exported.chat_template == original.chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_an_earlier_step_and_another_dtype(run, tmp_path):
    folder, net = run
    export_run(folder, tmp_path / "out", step=3, dtype=torch.bfloat16)
    again = OuroForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.lm_head.weight, (net.lm_head.weight / 2).bfloat16())


def test_a_run_with_tied_embeddings_is_exported(tmp_path):
    net, folder = model(torch.float32, tie_word_embeddings=True), tmp_path / "run"
    FAMILY.keep(net, None, folder / "model")
    save(folder, 1, net)
    export_run(folder, tmp_path / "out")
    again = OuroForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert_same(again(tokens(1, 4)).logits, net(tokens(1, 4)).logits, 1e-5)


def test_an_export_that_fails_leaves_nothing(run, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(OuroForCausalLM, "save_pretrained", fail)
    assert main(["export", str(run[0]), str(tmp_path / "out")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0}, "turns: expected"),
        ({"turns": 2.5}, "turns: expected"),
        ({"dtype": "bfloat16"}, "dtype: expected a torch.dtype, got 'bfloat16'"),
    ],
)
def test_mistakes_in_an_export_are_named(options, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        export_run(checkpoint(), tmp_path / "out", **options)


def test_stops_that_a_user_has_chosen_stay(copy, tmp_path):
    net = OuroForCausalLM.from_pretrained(copy)
    net.generation_config.eos_token_id = [0]
    net.save_pretrained(tmp_path / "saved")
    assert OuroForCausalLM.from_pretrained(tmp_path / "saved").generation_config.eos_token_id == [0]


@pytest.mark.parametrize(
    ("given", "config", "stops"),
    [
        (0, 0, [2, 0]),
        ([0], 0, [0, 2]),
        ([7], 0, [7, 2, 0]),
        (7, 0, [7, 2, 0]),
        (0, [9, 0], [2, 0, 9]),
        (None, 9, [2, 0, 9]),
    ],
)
def test_the_stops_of_an_export_are_all_that_anything_names(given, config, stops, copy, tmp_path):
    """The settings of generation, those of the model, the tokenizer's ends of a message."""
    settings = {"bos_token_id": 0, "pad_token_id": 0}
    settings |= {} if given is None else {"eos_token_id": given}
    (copy / "generation_config.json").write_text(json.dumps(settings))
    fields = json.loads((copy / "config.json").read_text()) | {"eos_token_id": config}
    (copy / "config.json").write_text(json.dumps(fields))
    out = export_run(copy, tmp_path / "out")
    written = json.loads((out / "generation_config.json").read_text())
    assert written["eos_token_id"] == stops


def test_a_checkpoint_can_be_exported(tmp_path):
    export_run(checkpoint(), tmp_path / "out", turns=2)
    assert OuroConfig.from_pretrained(tmp_path / "out").total_ut_steps == 2
    assert not list((tmp_path / "out").glob("*.py"))


def test_what_can_not_be_exported_is_said(run, tmp_path, capsys):
    folder, _ = run
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "addition" / "checkpoints").mkdir(parents=True)
    for words, message in (
        ([folder, tmp_path / "full"], "expected a new or empty folder"),
        ([folder, tmp_path / "new", "--step", "4"], "has no checkpoint of step 4"),
        ([tmp_path / "addition", tmp_path / "new"], "is no run of an Ouro model"),
        ([tmp_path / "nowhere", tmp_path / "new"], "nowhere"),
    ):
        assert main(["export", *map(str, words)]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "full" / "notes").read_text() == "mine"


def test_embeddings_are_found_and_resized():
    net = model(torch.float32)
    assert net.get_input_embeddings() is net.model.embed_tokens
    assert net.get_output_embeddings() is net.lm_head
    net.resize_token_embeddings(330)
    assert net(tokens(1, 4, vocab=330)).logits.shape == (1, 4, 330)


# -- size


def test_ouro_1_4b_has_its_number_of_parameters():
    with torch.device("meta"):
        net = OuroForCausalLM(OuroConfig())
    gate = sum(p.numel() for p in net.model.early_exit_gate.parameters())
    count = sum(p.numel() for p in net.parameters()) - gate
    assert gate == 2049
    # 24 layers of 4 D^2 + 3 D F + 4 D, embedding and head of V D each, the closing norm
    assert count == 24 * (4 * 2048**2 + 3 * 2048 * 5632 + 4 * 2048) + 2 * 49152 * 2048 + 2048
    assert round(count / 1e9, 4) == 1.4347
