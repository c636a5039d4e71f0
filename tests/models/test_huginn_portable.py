"""The one file of modelling code beside an exported Huginn or recurrent decoder: the native model's
numbers and tokens, in this process and in a fresh one in which stars_fast can't be imported."""

import json
from functools import cache

import pytest
import torch
from huginn_models import checkpoint, model, tokens
from oracle import relative_error
from portable_files import (
    EXACT,
    MASKS,
    SINGLE,
    B,
    S,
    alone,
    check_cache_keeps_its_turns,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from stars_fast import looped_block
from stars_fast.cli import main
from stars_fast.models.export import export_run
from stars_fast.models.families import family_of
from stars_fast.models.huginn import HuginnConfig, HuginnForCausalLM
from stars_fast.models.huginn.retrofit import retrofit
from stars_fast.models.huginn.tiny import SHAPES
from stars_fast.models.portable import holds_code
from stars_fast.models.portable import modeling_huginn_portable as portable

CODE = "modeling_huginn_portable"


@cache
def folder_of(shape, **config):
    """As the package writes it."""
    folder = checkpoint(shape).parent / f"{shape}-{len(config)}-{'-'.join(config)}"
    native = model(shape, torch.float32)
    for name, value in config.items():
        setattr(native.config, name, value)
    native.save_pretrained(folder)
    return folder


@cache
def pair(shape="huginn", dtype=torch.float64, **config):
    """The native model and the portable one, of the same folder."""
    folder = folder_of(shape, **config)
    return tuple(
        kind.from_pretrained(folder, dtype=dtype)
        for kind in (HuginnForCausalLM, portable.HuginnForCausalLM)
    )


def greedy(net, ids, new=8, **options):
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return net.generate(ids, max_new_tokens=new, **options)[:, ids.shape[1] :]


def assert_same_states(native, other, ids, real=None, **options):
    """Of the real tokens."""
    mine, theirs = (
        each(ids, attention_mask=real, output_hidden_states=True, **options)
        for each in (native, other)
    )
    seen = torch.ones_like(ids).bool() if real is None else real[:, -ids.shape[1] :].bool()
    assert len(theirs.hidden_states) == len(mine.hidden_states)
    for a, b in zip(theirs.hidden_states, mine.hidden_states, strict=True):
        torch.testing.assert_close(a[seen], b[seen], **EXACT)
    for name in ("logits", "inputs", "last_hidden_state"):
        torch.testing.assert_close(theirs[name][seen], mine[name][seen], **EXACT)
    assert torch.equal(theirs.turns, mine.turns)
    return mine, theirs


# -- one pass


@pytest.mark.parametrize("turns", [1, 4, 8])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_pass_is_the_native_one(shape, mask, turns):
    native, other = pair(shape)
    _, theirs = assert_same_states(native, other, tokens(B, S), MASKS[mask], turns=turns)
    assert len(theirs.hidden_states) == turns + 1


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_in_fp32_each_of_eight_turns_is_the_native_one_to_a_millionth(shape, mask):
    """From the native states each: a turn of random weights makes differences larger."""
    native, other = pair(shape, torch.float32)
    ids, real = tokens(B, S), MASKS[mask]
    seen = torch.ones_like(ids).bool() if real is None else real.bool()
    states = native(ids, attention_mask=real, turns=8, output_hidden_states=True).hidden_states
    for state in states[:-1]:
        how = {"attention_mask": real, "input_states": state, "turns": 1}
        mine, theirs = (each(ids, output_hidden_states=True, **how) for each in (native, other))
        assert relative_error(theirs.logits[seen], mine.logits[seen]) <= SINGLE
        pairs = zip(theirs.hidden_states, mine.hidden_states, strict=True)
        assert all(relative_error(a[seen], b[seen]) <= SINGLE for a, b in pairs)


@pytest.mark.parametrize(
    ("dtype", "turns"),
    [(torch.float32, 1), (torch.float32, 4), (torch.float32, 8), (torch.bfloat16, 1)],
)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_it_is_as_near_to_fp64_as_the_native_one(shape, turns, dtype):
    ids, near = tokens(16, S), []
    wide = pair(shape)[0](ids, turns=turns).logits
    for each in pair(shape, dtype):
        logits = each(ids, num_steps=turns).logits
        assert logits.dtype == dtype
        near.append(relative_error(logits.double(), wide))
    assert 0 < near[1] < 2 * near[0]


@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_attention_from_its_parts_says_the_same(mask):
    folder = folder_of("llama")
    other = portable.HuginnForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    assert_same_states(pair("llama")[0], other, tokens(B, S), MASKS[mask])


@torch.no_grad()
def test_positions_far_out_are_those_of_the_native_model():
    """Where the scaling of Llama's frequencies shows."""
    ids, positions = tokens(1, 6), torch.arange(20_000, 20_006)[None]
    mine, theirs = (each(ids, position_ids=positions).logits for each in pair("llama"))
    torch.testing.assert_close(theirs, mine, **EXACT)
    assert not torch.allclose(theirs, pair("llama")[1](ids).logits)


@torch.no_grad()
def test_positions_that_restart_are_packed_documents():
    native, other = pair()
    ids = tokens(2, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0]])
    mine, theirs = (each(ids, position_ids=positions) for each in (native, other))
    torch.testing.assert_close(theirs.logits, mine.logits, **EXACT)
    torch.testing.assert_close(theirs.logits[:1, 3:], other(ids[:1, 3:]).logits, **EXACT)
    assert theirs.get(portable.CACHE) is None
    with pytest.raises(ValueError, match="use_cache: expected False for packed documents"):
        other(ids, position_ids=positions, use_cache=True)


# -- the first state


@pytest.mark.parametrize("fields", [{"state_seed": 7}, {"initial_state_mode": "embed-init"}])
@torch.no_grad()
def test_the_first_state_is_that_of_the_configuration(fields):
    native, other = pair("huginn", **fields)
    _, theirs = assert_same_states(native, other, tokens(B, S), MASKS["left"])
    plain = pair()[1](tokens(B, S), output_hidden_states=True)
    assert not torch.allclose(theirs.hidden_states[0], plain.hidden_states[0])


@torch.no_grad()
def test_a_first_state_can_be_given():
    native, other = pair()
    given = torch.zeros(B, S, native.config.n_embd, dtype=torch.float64)
    _, theirs = assert_same_states(native, other, tokens(B, S), input_states=given)
    assert torch.equal(theirs.hidden_states[0], given)
    with pytest.raises(ValueError, match="input_states: expected"):
        other(tokens(B, S), input_states=given[:1])


def test_in_training_each_call_draws_its_own():
    other = portable.HuginnForCausalLM.from_pretrained(folder_of("huginn")).train()
    ids, starts = tokens(1, 5), []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        starts.append(other(ids, output_hidden_states=True).hidden_states[0])
    assert torch.equal(starts[0], starts[2])
    assert not torch.allclose(starts[0], starts[1])


# -- turns


CALLS = {
    "turns": {"turns": 7},
    "num_steps": {"num_steps": torch.tensor(3)},
    "tol": {"turns": 12, "tol": 1.0},
    "tol-for-all": {"turns": 12, "tol": 3.0},
    "tol-per-token": {"turns": 12, "tol": 1.0, "tol_per": "token"},
    "tol=0": {"tol": 0.0},
}


@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", ["huginn", "llama"])
@torch.no_grad()
def test_what_a_call_says_of_the_turns_counts_as_in_the_native_model(shape, call, mask):
    assert_same_states(*pair(shape), tokens(B, S), MASKS[mask], **CALLS[call])


@pytest.mark.parametrize("shape", ["huginn", "llama"])
@torch.no_grad()
def test_the_settings_here_do_what_they_are_there_for(shape):
    """Sequences, and tokens of a sequence, rest at several turns; and all of them at once."""
    _, other = pair(shape)
    taken = {name: other(tokens(B, S), **call).turns for name, call in CALLS.items()}
    assert len(set(taken["tol"][:, 0].tolist())) > 1
    assert all(len(set(row.tolist())) > 1 for row in taken["tol-per-token"])
    assert int(taken["tol-for-all"].max()) < 12


@torch.no_grad()
def test_a_tolerance_of_the_configuration_counts():
    native, other = pair("llama", convergence_tol=1.0, mean_recurrence=12)
    _, theirs = assert_same_states(native, other, tokens(B, S))
    assert torch.equal(theirs.turns, pair("llama")[1](tokens(B, S), **CALLS["tol"]).turns)


# -- the cache


@pytest.mark.parametrize("call", ["turns", "tol", "tol-for-all", "tol-per-token"])
@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_cache_changes_nothing(shape, mask, call):
    native, other = pair(shape)
    ids, real = tokens(B, S), MASKS[mask]
    whole = other(ids, attention_mask=real, use_cache=False, **CALLS[call]).logits
    caches, step = (None, None), 0
    for length in (4, 3, 1, 1):
        part = slice(step, step + length)
        seen = None if real is None else real[:, : part.stop]
        how = {"attention_mask": seen, "use_cache": True, **CALLS[call]}
        outs = [
            each(ids[:, part], past_key_values=cache, **how)
            for each, cache in zip((native, other), caches, strict=True)
        ]
        kept = slice(None) if seen is None else seen[:, part].bool()
        torch.testing.assert_close(outs[1].logits[kept], outs[0].logits[kept], **EXACT)
        if call == "turns":  # else a sequence counts as a whole, and its parts rest sooner
            torch.testing.assert_close(outs[1].logits[kept], whole[:, part][kept], **EXACT)
        caches, step = tuple(out[portable.CACHE] for out in outs), part.stop
    assert len(caches[1].layers) == 1 + CALLS[call]["turns"] * 2 + 1
    kept = slice(None) if real is None else real.bool()
    for mine, theirs in zip(*(held.layers for held in caches), strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert b.shape[-2] == S
            torch.testing.assert_close(*(x.transpose(1, 2)[kept] for x in (b, a)), **EXACT)


def test_a_cache_keeps_its_number_of_turns():
    check_cache_keeps_its_turns(pair()[1], portable, "HuginnCache")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"num_steps": 6},
        {"num_beams": 2},
        {"turns": 8, "tol": 1.0},
        {"turns": 8, "tol": 1.0, "tol_per": "token"},
    ],
)
@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("shape", ["huginn", "olmo2"])
def test_the_same_tokens_are_generated(shape, mask, options):
    ids = tokens(B, S)
    mine, theirs = (
        greedy(each, ids, attention_mask=MASKS[mask], **options)
        for each in pair(shape, torch.float32)
    )
    assert torch.equal(theirs, mine)
    assert len(set(mine.flatten().tolist())) > 3


def test_sampled_tokens_are_the_same_for_a_seed():
    made = []
    for each in pair("huginn", torch.float64):
        torch.manual_seed(3)
        made.append(each.generate(tokens(2, 5), max_new_tokens=12, do_sample=True))
    assert torch.equal(*made)


def test_generation_is_called_as_by_others():
    native, other = pair()
    words = AutoTokenizer.from_pretrained(checkpoint())
    ids = tokens(1, 7)
    ends = {"stop_strings": ["a"], "tokenizer": words}
    assert torch.equal(greedy(other, ids, new=20, **ends), greedy(native, ids, new=20, **ends))
    embeds = other.get_input_embeddings()(ids)
    made = other.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False)
    assert torch.equal(
        made, native.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False)
    )
    with pytest.raises(NotImplementedError, match="generate_batch: expected generate"):
        other.generate_batch([[5, 6]], max_new_tokens=2)


@pytest.mark.parametrize("name", ["turns", "num_steps", "tol", "tol_per"])
def test_a_depth_in_generation_settings_is_refused(name):
    other = portable.HuginnForCausalLM.from_pretrained(folder_of("huginn"))
    with pytest.raises(ValueError, match=f"generation_config: expected no {name}, got 1"):
        greedy(other, tokens(1, 4), generation_config=GenerationConfig(**{name: 1}))
    setattr(other.generation_config, name, 1)
    with pytest.raises(ValueError, match=f"generation_config: expected no {name}, got 1"):
        greedy(other, tokens(1, 4))


@pytest.mark.parametrize("name", ["turns", "num_steps"])
def test_turns_of_a_load_are_those_of_the_configuration(name):
    other = portable.HuginnForCausalLM.from_pretrained(folder_of("huginn"), **{name: 6, "tol": 0.0})
    native = pair("huginn", torch.float32)[0]
    assert other.config.mean_recurrence == 6
    assert torch.equal(greedy(other, tokens(1, 5)), greedy(native, tokens(1, 5), turns=6))


# -- the loss, and mistakes


def test_the_loss_and_its_gradient_are_the_native_ones():
    native, other = pair()
    ids, real = tokens(B, S), MASKS["right"]
    labels = ids.masked_fill(~real.bool(), -100)
    labels[0, 4] = -100
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for call in (
        {"attention_mask": real, "labels": labels},
        {"attention_mask": real, "labels": ids},
        {"attention_mask": real, "labels": ids, "num_items_in_batch": 7},
        {"labels": labels, "num_items_in_batch": torch.tensor(50)},
        {"labels": ids, "position_ids": packed},
    ):
        mine, theirs = (each(ids, **call) for each in (native, other))
        torch.testing.assert_close(theirs.loss, mine.loss, **EXACT)
        grads = [
            dict(zip(names, torch.autograd.grad(loss, list(values)), strict=True))
            for each, loss in ((native, mine.loss), (other, theirs.loss))
            for names, values in (zip(*each.named_parameters(), strict=True),)
        ]
        assert grads[0].keys() == grads[1].keys()
        for name, grad in grads[0].items():
            torch.testing.assert_close(grads[1][name], grad, **EXACT)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"turns": 0}, ValueError, "turns: expected an integer of at least 1, got 0"),
        ({"num_steps": 2.5}, ValueError, "turns: expected an integer of at least 1, got 2.5"),
        ({"num_steps": (4, 4)}, ValueError, "turns: expected an integer of at least 1, got .4, 4."),
        ({"turns": 4, "num_steps": 4}, ValueError, "num_steps: expected None when turns"),
        ({"tol_per": "row"}, ValueError, "tol_per: expected 'sequence' or 'token', got 'row'"),
        ({"attention_mask": torch.ones(1, 3)}, ValueError, "attention_mask: expected .B, 4."),
        ({"output_attentions": True}, ValueError, "output_attentions: expected False"),
        ({"turn": 4}, TypeError, "unknown arguments .'turn'."),
        ({"inputs_embeds": torch.ones(1, 4, 32)}, ValueError, "input_ids: expected either"),
    ],
)
def test_mistakes_are_named(options, kind, message):
    with pytest.raises(kind, match=message):
        pair()[1](tokens(1, 4), **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mean_recurrence": 0}, "turns: expected an integer of at least 1, got 0"),
        ({"layer_layout": "gpt"}, "layer_layout: expected one of"),
        ({"initial_state_mode": "zero"}, "initial_state_mode: expected one of"),
        ({"injection_type": "add"}, "injection_type: expected 'linear', got 'add'"),
        ({"test_time_noise": 0.1}, "test_time_noise: expected 0, got 0.1"),
        (
            {"layer_layout": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling: expected rope_type",
        ),
    ],
)
def test_settings_that_have_no_meaning_are_named(fields, message):
    sizes = {"n_embd": 8, "n_heads": 2, "intermediate_size": 8, "vocab_size": 11}
    with pytest.raises(ValueError, match=message):
        portable.HuginnForCausalLM(portable.HuginnConfig(**sizes, **fields))


def test_the_turn_of_the_fused_path_is_the_native_models():
    with pytest.raises(TypeError, match="expected Huginn's rotary table"):
        looped_block(pair()[1])


def test_more_tokens_are_saved_with_the_configuration(tmp_path):
    other = portable.HuginnForCausalLM.from_pretrained(folder_of("huginn"))
    other.resize_token_embeddings(330)
    other.save_pretrained(tmp_path / "wider")
    for kind in (portable.HuginnForCausalLM, HuginnForCausalLM):
        again = kind.from_pretrained(tmp_path / "wider")
        assert again(tokens(1, 3)).logits.shape[-1] == 330


@pytest.mark.parametrize("shape", SHAPES)
def test_the_defaults_and_fields_are_the_native_ones(shape):
    kinds = HuginnConfig, portable.HuginnConfig
    a, b = (kind.from_pretrained(folder_of(shape)).to_dict() for kind in kinds)
    assert a == b
    a, b = (kind().to_dict() for kind in kinds)
    assert {name: a[name] for name in b if name != "init_values"} == {
        name: b[name] for name in b if name != "init_values"
    }
    assert b["init_values"].items() <= a["init_values"].items()


# -- the folder


@pytest.fixture(scope="module", params=SHAPES)
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("portable") / request.param
    words = ["export", str(checkpoint(request.param)), str(folder), "--portable", "--turns", "6"]
    assert main(words) == 0
    return folder


ALONE = """
import json
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, saved, real = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[4]))
ids = torch.tensor(json.loads(sys.argv[3]))
options = {"trust_remote_code": True}
net = AutoModelForCausalLM.from_pretrained(folder, **options)
net.save_pretrained(saved)  # its code goes along
again = AutoModelForCausalLM.from_pretrained(saved, num_steps=3, **options)
how = {"attention_mask": real, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
with torch.no_grad():
    print(json.dumps({
        "classes": [type(x).__name__ for x in (net, net.config)],
        "modules": sorted({type(x).__module__.split(".")[-1] for x in (net, net.config)}),
        "turns": [net.config.mean_recurrence, again.config.turns],
        "dtypes": sorted({str(p.dtype) for p in net.parameters()}),
        "stops": net.generation_config.eos_token_id,
        "text": AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("3 + 4 =").input_ids,
        "logits": net(ids, attention_mask=real, turns=1).logits.tolist(),
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
    saved = tmp_path / "saved"
    words = (exported, saved, json.dumps(ids.tolist()), json.dumps(real.tolist()))
    said = alone(ALONE, *words)
    native = HuginnForCausalLM.from_pretrained(exported)
    seen, logits = real.bool(), native(ids, attention_mask=real, turns=1).logits
    assert relative_error(torch.tensor(said["logits"])[seen], logits[seen]) <= SINGLE
    made = greedy(native, ids, attention_mask=real).tolist()
    assert [row[S:] for row in said["tokens"]] == [row[S:] for row in said["uncached"]] == made
    three = greedy(native, ids, attention_mask=real, turns=3).tolist()
    assert [row[S:] for row in said["three"]] == three != made
    assert said["classes"] == ["HuginnForCausalLM", "HuginnConfig"]
    assert (said["modules"], said["ours"]) == ([CODE], [])
    assert (said["turns"], said["stops"]) == ([6, 3], [2, 0])
    assert said["dtypes"] == ["torch.float32"]
    assert said["text"] == AutoTokenizer.from_pretrained(exported)("3 + 4 =").input_ids
    assert (saved / f"{CODE}.py").exists()
    back = HuginnForCausalLM.from_pretrained(saved)  # what it saves the package reads
    assert torch.equal(back(ids, attention_mask=real, turns=1).logits, logits)


def test_the_folder_is_that_of_a_plain_export_with_code_beside_it(exported, tmp_path):
    plain = export_run(checkpoint(exported.name), tmp_path / "plain", turns=6)
    files = {path.name for path in exported.iterdir()}
    assert files == {path.name for path in plain.iterdir()} | {f"{CODE}.py"}
    config = json.loads((exported / "config.json").read_text())
    assert config.pop("auto_map") == {
        "AutoConfig": f"{CODE}.HuginnConfig",
        "AutoModelForCausalLM": f"{CODE}.HuginnForCausalLM",
    }
    assert config == json.loads((plain / "config.json").read_text())
    for name in files - {"config.json", f"{CODE}.py"}:
        assert (exported / name).read_bytes() == (plain / name).read_bytes()
    assert holds_code(exported, CODE)
    assert not holds_code(plain, CODE)


def test_here_the_folder_opens_as_the_native_model(exported):
    """Its code is not run: neither by the package nor by the Auto classes that know it."""
    assert family_of(exported).load(str(exported), None).config.mean_recurrence == 6
    assert type(AutoConfig.from_pretrained(exported)) is HuginnConfig
    assert type(AutoModelForCausalLM.from_pretrained(exported)) is HuginnForCausalLM


def test_a_dtype_of_an_export_is_kept(tmp_path):
    folder = export_run(checkpoint("llama"), tmp_path / "out", portable=True, dtype=torch.bfloat16)
    assert portable.HuginnForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@torch.no_grad()
def test_a_decoder_made_recurrent_here_opens_too(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 320}
    decoder = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    retrofit(decoder, [0], [1], [2], turns=2).save_pretrained(tmp_path / "recurrent")
    folder = export_run(tmp_path / "recurrent", tmp_path / "out", portable=True)
    other = portable.HuginnForCausalLM.from_pretrained(folder)
    ids = tokens(2, 7)
    assert relative_error(other(ids).logits, decoder(ids).logits) <= SINGLE
