"""The one file of modelling code beside an exported Ouro: the native model's numbers and tokens, in
this process and in a fresh one in which stars_fast can't be imported."""

import ast
import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from oracle import relative_error
from ouro_models import checkpoint, greedy, model, tokens
from portable_files import (
    EXACT,
    MASKS,
    SINGLE,
    B,
    S,
    alone,
    assert_same_states,
    check_cache_keeps_its_turns,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Trainer,
    TrainingArguments,
)

from stars_fast.cli import main
from stars_fast.models.export import export_run
from stars_fast.models.families import family_named, family_of
from stars_fast.models.looped import LoopedConfig, LoopedLM
from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.models.ouro.tiny import write_tiny_ouro
from stars_fast.models.portable import holds_code
from stars_fast.models.portable import modeling_ouro_portable as portable

CODE = "modeling_ouro_portable"
CODES = sorted(Path(portable.__file__).parent.glob("modeling_*.py"))

SETTINGS = {
    "published": {},
    "grouped": {"num_key_value_heads": 2, "head_dim": 6},
    "tied": {"tie_word_embeddings": True},
    "windowed": {
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 3,
    },
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "exit-step": {"early_exit_step": 1},
    "exit-gate": {"early_exit_threshold": 0.6},
    "rests": {"convergence_tol": 0.7, "total_ut_steps": 8},
    "no-gate": {"gate": "ignored", "total_ut_steps": 2},
}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


@cache
def pair(name="published", dtype=torch.float64):
    """The native model and the portable one, of the same folder."""
    fields = SETTINGS[name]
    folder = checkpoint(**fields)
    return model(dtype, **fields), portable.OuroForCausalLM.from_pretrained(folder, dtype=dtype)


# -- one pass


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_a_pass_is_the_native_one(name, mask, attention):
    native, other = pair(name)
    other.set_attn_implementation(attention)
    assert_same_states(native, other, tokens(B, S), MASKS[mask], use_cache=False)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_in_fp32_it_is_the_native_one_to_a_millionth(name, mask):
    native, other = pair(name, torch.float32)
    other.set_attn_implementation("sdpa")
    ids, real = tokens(B, S), MASKS[mask]
    mine, theirs = (each(ids, attention_mask=real).logits for each in (native, other))
    seen = torch.ones_like(ids).bool() if real is None else real.bool()
    assert relative_error(theirs[seen], mine[seen]) <= SINGLE


@pytest.mark.parametrize("name", ROPES)
@torch.no_grad()
def test_scaled_positions_are_those_of_the_native_model(name, tmp_path):
    rope = ROPES[name] | {"rope_theta": 10_000.0}
    folder = write_tiny_ouro(tmp_path / "tiny", rope_parameters=rope)
    native = OuroForCausalLM.from_pretrained(folder, dtype=torch.float64)
    other = portable.OuroForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = tokens(1, 100)
    _, theirs = assert_same_states(native, other, ids, use_cache=False)
    assert not torch.allclose(theirs.logits, pair()[1](ids).logits)


@torch.no_grad()
def test_positions_that_restart_are_packed_documents():
    native, other = pair("windowed")
    ids = tokens(2, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0]])
    mine, theirs = (each(ids, position_ids=positions) for each in (native, other))
    torch.testing.assert_close(theirs.logits, mine.logits, **EXACT)
    alone = other(ids[:1, 3:]).logits
    torch.testing.assert_close(theirs.logits[:1, 3:], alone, **EXACT)
    assert theirs.get(portable.CACHE) is None
    with pytest.raises(ValueError, match="use_cache: expected False for packed documents"):
        other(ids, position_ids=positions, use_cache=True)


CALLS = {
    "turns": {"turns": 7},
    "one-turn": {"turns": 1},
    "exit_at_step": {"turns": 3, "exit_at_step": 1},
    "exit_threshold": {"exit_threshold": 0.6},
    "exit_threshold=1": {"exit_threshold": 1.0},
    "tol": {"turns": 8, "tol": 0.7},
    "tol=0": {"tol": 0.0},
    "tol-and-gate": {"turns": 8, "tol": 0.7, "exit_threshold": 0.8},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["published", "exit-gate", "exit-step", "rests"])
@torch.no_grad()
def test_what_a_call_says_of_the_turns_counts_as_in_the_native_model(name, call):
    native, other = pair(name)
    assert_same_states(native, other, tokens(B, S), MASKS["left"], **CALLS[call])


@torch.no_grad()
def test_the_settings_here_do_what_they_are_there_for():
    """Tokens leave at several turns, and sequences rest at several."""
    _, other = pair()
    ids = tokens(B, S)
    h = other.model(ids, output_hidden_states=True).hidden_states
    out = other.model(ids, exit_threshold=0.6).last_hidden_state
    left = {int((out == state).all(-1).sum()) for state in h[1:]}
    assert len(left - {0}) > 1
    taken = other(ids, turns=8, tol=0.7).turns[:, 0].tolist()
    assert len(set(taken)) > 1


# -- the cache


@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_a_cache_changes_nothing(name, mask):
    native, other = pair(name)
    other.set_attn_implementation("sdpa")
    ids, real = tokens(B, S), MASKS[mask]
    whole = other(ids, attention_mask=real, use_cache=False).logits
    caches, step = (None, None), 0
    for length in (4, 3, 1, 1):
        part = slice(step, step + length)
        seen = None if real is None else real[:, : part.stop]
        outs = [
            each(ids[:, part], attention_mask=seen, past_key_values=cache, use_cache=True)
            for each, cache in zip((native, other), caches, strict=True)
        ]
        kept = slice(None) if seen is None else seen[:, part].bool()
        torch.testing.assert_close(outs[1].logits[kept], outs[0].logits[kept], **EXACT)
        if name != "rests":  # there a sequence counts as a whole, and its parts rest sooner
            torch.testing.assert_close(outs[1].logits[kept], whole[:, part][kept], **EXACT)
        caches, step = tuple(out[portable.CACHE] for out in outs), part.stop
    turns = 2 if name == "exit-step" else other.config.total_ut_steps
    assert len(caches[1].layers) == turns * other.config.num_hidden_layers
    assert caches[1].get_seq_length() == S


def test_a_cache_keeps_its_number_of_turns():
    check_cache_keeps_its_turns(pair()[1], portable, "OuroCache")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"turns": 6},
        {"num_beams": 2},
        {"exit_threshold": 0.6},
        {"turns": 8, "tol": 0.7},
    ],
)
@pytest.mark.parametrize("name", ["published", "grouped", "windowed"])
def test_the_same_tokens_are_generated(name, options):
    native, other = pair(name, torch.float32)
    other.set_attn_implementation("sdpa")
    ids, real = tokens(B, S), MASKS["left"]
    mine, theirs = (
        greedy(each, ids, new=12, attention_mask=real, **options) for each in (native, other)
    )
    assert torch.equal(theirs, mine)
    assert len(set(mine.flatten().tolist())) > 3


def test_generation_is_called_as_by_others(tmp_path):
    native, other = pair()
    words = AutoTokenizer.from_pretrained(checkpoint())
    ids = tokens(1, 7)
    ends = {"stop_strings": ["a"], "tokenizer": words}
    assert torch.equal(greedy(other, ids, new=20, **ends), greedy(native, ids, new=20, **ends))
    embeds = other.get_input_embeddings()(ids)
    made = other.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False)
    assert torch.equal(made, native.generate(inputs_embeds=embeds, max_new_tokens=8))
    with pytest.raises(NotImplementedError, match="generate_batch: expected generate"):
        other.generate_batch([[5, 6]], max_new_tokens=2)


@pytest.mark.parametrize("name", ["turns", "exit_at_step", "exit_threshold", "tol"])
def test_a_depth_in_generation_settings_is_refused(name):
    other = portable.OuroForCausalLM.from_pretrained(checkpoint())
    with pytest.raises(ValueError, match=f"generation_config: expected no {name}, got 1"):
        greedy(other, tokens(1, 4), generation_config=GenerationConfig(**{name: 1}))
    setattr(other.generation_config, name, 1)
    with pytest.raises(ValueError, match=f"generation_config: expected no {name}, got 1"):
        greedy(other, tokens(1, 4))


def test_turns_of_a_load_are_those_of_the_configuration():
    other = portable.OuroForCausalLM.from_pretrained(checkpoint(), turns=6, tol=0.0)
    assert torch.equal(
        greedy(other, tokens(1, 5)), greedy(model(torch.float32), tokens(1, 5), turns=6)
    )


# -- the loss, and mistakes


def test_the_loss_is_the_native_one():
    native, other = pair()
    ids, real = tokens(B, S), MASKS["right"]
    labels = ids.masked_fill(~real.bool(), -100)
    labels[0, 4] = -100
    for given, count in ((labels, None), (ids, None), (labels, 7), (labels, torch.tensor(50))):
        call = {"attention_mask": real, "labels": given, "num_items_in_batch": count}
        mine, theirs = (each(ids, **call) for each in (native, other))
        torch.testing.assert_close(theirs.loss, mine.loss, **EXACT)


def test_the_last_token_of_a_packed_document_foretells_nothing():
    positions, ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), tokens(B, S)
    mine, theirs = (each(ids, position_ids=positions, labels=ids) for each in pair())
    torch.testing.assert_close(theirs.loss, mine.loss, **EXACT)


def test_a_trainer_accumulates_its_gradients(tmp_path):
    found = []
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, S)]
    for part in (1, 4):
        other = portable.OuroForCausalLM.from_pretrained(checkpoint())
        args = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=8 // part,
            gradient_accumulation_steps=part,
            max_steps=1,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(other, args, train_dataset=rows)
        trainer.train()
        found.append(trainer.state.log_history[0])
    for name in ("loss", "grad_norm"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"turns": 0}, ValueError, "turns: expected at least 1, got 0"),
        ({"exit_at_step": 4}, ValueError, "exit_at_step: expected less than turns=4, got 4"),
        ({"exit_threshold": 0.0}, ValueError, "exit_threshold: expected a number in"),
        ({"exit_threshold": 0.5, "exit_at_step": 1}, ValueError, "got both"),
        ({"attention_mask": torch.ones(1, 3)}, ValueError, "attention_mask: expected .B, 4."),
        ({"output_attentions": True}, ValueError, "output_attentions: expected False"),
        ({"turn": 4}, TypeError, "unknown arguments .'turn'."),
        ({"inputs_embeds": torch.ones(1, 4, 32)}, ValueError, "input_ids: expected either"),
    ],
)
def test_mistakes_are_named(options, kind, message):
    with pytest.raises(kind, match=message):
        pair()[1](tokens(1, 4), **options)
    with pytest.raises(ValueError, match="has no exit"):
        pair("no-gate")[1](tokens(1, 4), exit_threshold=0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"total_ut_steps": 0}, "total_ut_steps: expected at least 1, got 0"),
        ({"early_exit_step": 4}, "early_exit_step: expected one of the 4 turns"),
        ({"attention_dropout": 0.1}, "attention_dropout: expected 0"),
        ({"layer_types": ["linear_attention"]}, "layer_types: expected full_attention or"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_parameters: expected rope_type",
        ),
    ],
)
def test_settings_that_have_no_meaning_are_named(fields, message):
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "head_dim": 4, "vocab_size": 11}
    config = portable.OuroConfig(**sizes, **fields)
    with pytest.raises(ValueError, match=message):
        portable.OuroModel(config)


# -- the folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("portable") / "ouro"
    words = ["export", str(checkpoint(num_key_value_heads=2)), str(folder), "--portable"]
    assert main([*words, "--turns", "6"]) == 0
    return folder


ALONE = """
import json
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
)

folder, saved, real = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[4]))
ids = torch.tensor(json.loads(sys.argv[3]))
options = {"trust_remote_code": True, "dtype": torch.float32}
net = AutoModelForCausalLM.from_pretrained(folder, **options)
net.save_pretrained(saved)  # its code goes along
again = AutoModelForCausalLM.from_pretrained(saved, turns=3, **options)
body = AutoModel.from_pretrained(folder, **options)
how = {"attention_mask": real, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
with torch.no_grad():
    print(json.dumps({
        "classes": [type(x).__name__ for x in (net, body, net.config)],
        "modules": sorted({type(x).__module__.split(".")[-1] for x in (net, body, net.config)}),
        "turns": [net.config.total_ut_steps, again.config.turns],
        "stops": net.generation_config.eos_token_id,
        "text": AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("3 + 4 =").input_ids,
        "logits": net(ids, attention_mask=real).logits.tolist(),
        "states": body(ids, attention_mask=real).last_hidden_state.tolist(),
        "tokens": net.generate(ids, **how).tolist(),
        "uncached": net.generate(ids, use_cache=False, **how).tolist(),
        "three": again.generate(ids, **how).tolist(),
        "ours": sorted(name for name in sys.modules if name.startswith("stars_fast")),
    }))
"""


@pytest.mark.slow
@torch.no_grad()
def test_the_folder_opens_where_this_package_is_not(exported, tmp_path):
    ids, real = tokens(B, S), MASKS["left"]
    words = (exported, tmp_path / "saved", json.dumps(ids.tolist()), json.dumps(real.tolist()))
    said = alone(ALONE, *words)
    native = OuroForCausalLM.from_pretrained(exported, dtype=torch.float32)
    out = native(ids, attention_mask=real)
    seen = real.bool()
    assert relative_error(torch.tensor(said["logits"])[seen], out.logits[seen]) <= SINGLE
    states = native.model(ids, attention_mask=real).last_hidden_state
    assert relative_error(torch.tensor(said["states"])[seen], states[seen]) <= SINGLE
    made = greedy(native, ids, attention_mask=real).tolist()
    assert [row[S:] for row in said["tokens"]] == [row[S:] for row in said["uncached"]] == made
    three = greedy(native, ids, attention_mask=real, turns=3).tolist()
    assert [row[S:] for row in said["three"]] == three != made
    assert said["classes"] == ["OuroForCausalLM", "OuroModel", "OuroConfig"]
    assert (said["modules"], said["ours"]) == ([CODE], [])
    assert (said["turns"], said["stops"]) == ([6, 3], [2, 0])
    assert said["text"] == AutoTokenizer.from_pretrained(checkpoint())("3 + 4 =").input_ids
    assert (tmp_path / "saved" / f"{CODE}.py").exists()


def test_the_folder_is_that_of_a_plain_export_with_code_beside_it(exported, tmp_path):
    plain = export_run(checkpoint(num_key_value_heads=2), tmp_path / "plain", turns=6)
    files = {path.name for path in exported.iterdir()}
    assert files == {path.name for path in plain.iterdir()} | {f"{CODE}.py"}
    config = json.loads((exported / "config.json").read_text())
    assert config.pop("auto_map") == {
        "AutoConfig": f"{CODE}.OuroConfig",
        "AutoModel": f"{CODE}.OuroModel",
        "AutoModelForCausalLM": f"{CODE}.OuroForCausalLM",
    }
    assert config == json.loads((plain / "config.json").read_text())
    for name in files - {"config.json", f"{CODE}.py"}:
        assert (exported / name).read_bytes() == (plain / name).read_bytes()
    assert holds_code(exported, CODE)
    assert not holds_code(plain, CODE)


def test_here_the_folder_opens_as_the_native_model(exported):
    """Its code is not run: neither by the package nor by the Auto classes that know it."""
    assert family_of(exported).load(str(exported), None).config.total_ut_steps == 6
    config = AutoConfig.from_pretrained(exported)
    assert type(AutoModelForCausalLM.from_pretrained(exported)) is OuroForCausalLM
    assert type(AutoModel.from_config(config)).__module__ == "stars_fast.models.ouro.model"


def test_other_families_have_no_such_code(tmp_path, capsys):
    net = LoopedLM(LoopedConfig(vocab_size=11, max_length=8, d_model=16, n_heads=2, d_ff=16))
    family = family_named("looped_lm")
    shape = {"beside": "", "dtype": None, "turns": None, "shard": "5GB"}
    family.export(net, tmp_path / "looped", **shape)
    assert main(["export", str(tmp_path / "looped"), str(tmp_path / "out"), "--portable"]) == 2
    said = capsys.readouterr().err
    assert "portable: expected none for a model of LoopedLM, got it: there is code" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.stem)
def test_the_code_imports_pytorch_and_transformers_alone(code):
    names = set()
    for node in ast.walk(ast.parse(code.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    assert names - sys.stdlib_module_names == {"torch", "transformers"}
