import json
from itertools import pairwise

import ouro_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from stars_fast.data.tiny_tokenizer import SPECIAL_TOKENS, train_tokenizer
from stars_fast.models.ouro.tiny import random_weights, weight_shapes, write_tiny_ouro

LAYER = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
    "input_layernorm": (32,),
    "input_layernorm_2": (32,),
    "post_attention_layernorm": (32,),
    "post_attention_layernorm_2": (32,),
}
MODEL = {
    "model.embed_tokens.weight": (300, 32),
    "model.norm.weight": (32,),
    "model.early_exit_gate.weight": (1, 32),
    "model.early_exit_gate.bias": (1,),
    "lm_head.weight": (300, 32),
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And 1 + 1?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_ouro(tmp_path_factory.mktemp("tiny"), vocab_size=300, num_key_value_heads=2)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_files_of_a_published_checkpoint(folder):
    assert {path.name for path in folder.iterdir()} == set(
        "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json "
        "special_tokens_map.json configuration_ouro.py modeling_ouro.py".split()
    )


def test_keys_and_shapes(folder):
    layers = {f"model.layers.{i}.{name}.weight": LAYER[name] for i in range(2) for name in LAYER}
    weights = load_file(folder / "model.safetensors")
    assert {key: tuple(weight.shape) for key, weight in weights.items()} == MODEL | layers
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_tied_head_is_not_stored(tmp_path):
    write_tiny_ouro(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert config_of(tmp_path)["tie_word_embeddings"] is True


def test_configuration_is_in_the_published_form(folder):
    config = config_of(folder)
    assert config["model_type"] == "ouro"
    assert config["architectures"] == ["OuroForCausalLM"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_ouro.OuroForCausalLM"
    assert (config["rope_theta"], config["rope_scaling"]) == (1e6, None)
    assert "rope_parameters" not in config
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["torch_dtype"] == "float32"
    assert (config["vocab_size"], config["head_dim"], config["num_key_value_heads"]) == (300, 8, 2)
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 0)


def test_generation_stops_at_the_end_of_a_message(folder):
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert SPECIAL_TOKENS.index("<|im_end|>") in stops


@pytest.mark.parametrize("name", ["configuration_ouro", "modeling_ouro"])
def test_code_of_the_checkpoint_raises(folder, name):
    source = (folder / f"{name}.py").read_text()
    with pytest.raises(ImportError, match=name):
        exec(compile(source, name, "exec"))


def test_code_may_be_left_out(tmp_path):
    write_tiny_ouro(tmp_path, remote_code=False)
    assert not list(tmp_path.glob("*.py"))
    assert "auto_map" not in config_of(tmp_path)


@pytest.mark.parametrize("shards", [1, 2, 7, 27])
def test_shards_hold_the_same_weights(folder, tmp_path, shards):
    write_tiny_ouro(tmp_path, vocab_size=300, num_key_value_heads=2, shards=shards)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    if shards == 1:
        assert files == ["model.safetensors"]
    else:
        numbers = range(1, shards + 1)
        assert files == [f"model-{i:05}-of-{shards:05}.safetensors" for i in numbers]
    parts = {name: load_file(tmp_path / name) for name in files}
    whole = load_file(folder / "model.safetensors")
    assert sum(map(len, parts.values())) == len(whole)
    for part in parts.values():
        assert part
        assert all(torch.equal(weight, whole[key]) for key, weight in part.items())
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (shards > 1)
    if shards > 1:
        content = json.loads(index.read_text())
        where = {key: name for name, part in parts.items() for key in part}
        assert content["weight_map"] == where
        assert content["metadata"]["total_size"] == sum(w.nbytes for w in whole.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_one_seed_are_roundings_of_one_draw(folder, tmp_path, dtype):
    write_tiny_ouro(tmp_path, vocab_size=300, num_key_value_heads=2, dtype=dtype)
    drawn = load_file(folder / "model.safetensors")
    for key, weight in load_file(tmp_path / "model.safetensors").items():
        assert weight.dtype == dtype
        assert torch.equal(weight, drawn[key].to(dtype))
    assert f"torch.{config_of(tmp_path)['torch_dtype']}" == str(dtype)


def test_the_seed_makes_the_weights(folder, tmp_path):
    for seed in (0, 1):
        write_tiny_ouro(tmp_path / str(seed), vocab_size=300, num_key_value_heads=2, seed=seed)
    whole, same, other = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "0", tmp_path / "1")
    )
    assert all(torch.equal(whole[key], same[key]) for key in whole)
    assert not any(torch.equal(whole[key], other[key]) for key in whole)


def test_states_and_logits_are_of_order_one_and_every_turn_counts(folder):
    config = config_of(folder)
    ids = torch.randint(300, (4, 16), generator=torch.Generator().manual_seed(0))
    weights = load_file(folder / "model.safetensors")
    logits, states = ouro_reference.logits(weights, config, ids, None, 8, return_states=True)
    assert 0.5 < logits.std() < 2
    for before, after in pairwise(states):
        assert 0.5 < after.square().mean().sqrt() < 2
        assert (after - before).norm() / before.norm() > 0.01
    assert weights["model.early_exit_gate.weight"].norm() > 0.1
    assert weights["model.early_exit_gate.bias"].abs() > 0.1


def test_no_two_weights_are_alike():
    config = {"num_hidden_layers": 3, "vocab_size": 300, "tie_word_embeddings": False}
    config |= dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    weights = random_weights(weight_shapes(config), 0, torch.float32)
    square = [weight for weight in weights.values() if weight.shape == (32, 32)]
    norms = [weight for key, weight in weights.items() if "norm" in key]
    assert (len(square), len(norms)) == (21, 13)
    for group in (square, norms):
        assert len({tuple(weight.flatten().tolist()) for weight in group}) == len(group)
    assert all(0.3 < norm.min() < 0.9 < 1.1 < norm.max() < 1.7 for norm in norms)


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back_from_its_tokens(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(0 <= i < 300 for i in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "  12  + 3\n\n", "12 , 3 . it 's", "\r\n\t", "<|im_end|>", "é日本🙂\u200d\x00"],
)
def test_awkward_texts_come_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_have_the_published_ids(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    for role in ("bos", "eos", "pad", "unk"):
        assert getattr(tokenizer, f"{role}_token_id") == 0
    assert tokenizer.encode("a<|im_end|>") == [*tokenizer.encode("a"), 2]
    assert tokenizer.decode([1, *tokenizer.encode("a b"), 2], skip_special_tokens=True) == "a b"


def test_a_digit_is_a_token_and_words_are_merged(tokenizer):
    assert len(tokenizer.encode("1203")) == 4
    assert len(tokenizer.encode("assistant")) == 1
    assert len(tokenizer) == 300


def test_chats_are_chatml(tokenizer):
    chat = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n"
        "<|im_start|>assistant\n42<|im_end|>\n"
        "<|im_start|>user\nAnd 1 + 1?<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == chat
    opened = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert opened == chat + "<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert ids == tokenizer.encode(chat)
    assert (ids.count(1), ids.count(2)) == (4, 4)


def test_batches_are_padded_with_token_0(tokenizer):
    batch = tokenizer(["1", "12 + 3"], padding=True, padding_side="left", return_tensors="pt")
    assert batch["input_ids"][0, 0] == 0
    assert batch["attention_mask"].sum(1).tolist() == [1, len(tokenizer.encode("12 + 3"))]


def test_a_tokenizer_is_no_larger_than_asked_and_always_the_same():
    texts = ["ab ab ab"]
    assert train_tokenizer(259).get_vocab_size() == 259
    assert train_tokenizer(1000, texts).get_vocab_size() == 261  # "ab" and " ab"
    assert train_tokenizer(320).to_str() == train_tokenizer(320).to_str()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"vocab_size": 258}, ValueError, "vocab_size: expected an integer >= 259, got 258"),
        ({"shards": 0}, ValueError, "shards: expected an integer >= 1, got 0"),
        ({"shards": 28}, ValueError, "shards: expected at most the 27 weights, got 28"),
        ({"head_dim": 0}, ValueError, "head_dim: expected an integer >= 1, got 0"),
        ({"hidden_size": 1.5}, ValueError, "hidden_size: expected an integer >= 1, got 1.5"),
        ({"n_layers": 3}, TypeError, r"config: expected fields among \[.*\], got \['n_layers'\]"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named_and_nothing_is_written(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        write_tiny_ouro(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"folder: expected a new or empty folder, got .*notes\.txt"
    ):
        write_tiny_ouro(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
