"""The one file of modelling code beside an exported looped decoder: the native model's numbers and
tokens, in this process and in a fresh one in which stars_fast can't be imported."""

import copy
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from decoder_models import DECODERS, MORE, WIDTH, decoder, left_padded, tokens
from oracle import relative_error
from portable_files import alone, assert_same_states, check_cache_keeps_its_turns
from test_looped_decoder import SETTINGS, greedy, looped
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from stars_fast.cli import main
from stars_fast.models.export import export_run
from stars_fast.models.looped_decoder import (
    LoopedDecoderConfig,
    LoopedDecoderForCausalLM,
    LoopedDecoderModel,
)
from stars_fast.models.portable import holds_code
from stars_fast.models.portable import modeling_looped_decoder_portable as portable

CODE = "modeling_looped_decoder_portable"
EXACT = {"rtol": 1e-9, "atol": 1e-9}  # fp64: another order of sums
SINGLE = 1e-6  # of the whole, in the L2 norm
B, S = 3, 9
DEPTHS = (1, 4, 9)

MAIN = ("llama", "gemma3", "olmo2", "gpt2")
CASES = [(name, i) for name in MAIN for i in range(len(SETTINGS))]
CASES += [
    pytest.param(name, i % len(SETTINGS), marks=pytest.mark.slow)
    for i, name in enumerate(DECODERS | MORE)
    if name not in MAIN
]
IN_FP32 = (
    "olmoe",
    "deepseek_v3",
    "gpt_neo",
    "codegen",
)  # transformers computes parts of them in no other

_folders = []


@cache
def folder(name="llama", setting=0, **fields):
    """A looped decoder's checkpoint, kept until the end of the process."""
    _folders.append(TemporaryDirectory())
    place = Path(_folders[-1].name) / name
    looped(name, torch.float32, turns=3, **SETTINGS[setting], **fields).save_pretrained(place)
    return place


@cache
def pair(name="llama", setting=0, dtype=torch.float64, **fields):
    """The native model and the portable one, of the same folder."""
    kinds = LoopedDecoderForCausalLM, portable.LoopedDecoderForCausalLM
    place = folder(name, setting, **fields)
    return tuple(kind.from_pretrained(place, dtype=dtype).eval() for kind in kinds)


@cache
def resting():
    """The same pair, its turns a contraction, so that sequences rest at several turns."""
    place = folder("llama", 1 + SETTINGS[1:].index(SETTINGS[3]), block=1, layers=(0, 1, 2))
    kinds = LoopedDecoderForCausalLM, portable.LoopedDecoderForCausalLM
    both = tuple(kind.from_pretrained(place, dtype=torch.float64).eval() for kind in kinds)
    for each in both:
        state, inputs = each.model.adapter.linear.weight.data.chunk(2, 1)
        state.mul_(0.3)
        inputs.add_(torch.eye(WIDTH))
    return both


def rows_of(*rows):
    return torch.tensor([[int(c) for c in row] for row in rows])


MASKS = {
    "none": None,
    "left": rows_of("111111111", "000111111", "000000011"),
    "right": rows_of("111111111", "111111000", "110000000"),
    "holes": rows_of("111111111", "110011011", "011101110"),
}


# -- one pass


@pytest.mark.parametrize(("name", "setting"), CASES)
@torch.no_grad()
def test_in_fp32_it_is_the_native_one_to_a_millionth(name, setting):
    native, other = pair(name, setting, torch.float32)
    ids = tokens(B, S)
    for turns, mask in [*((turns, "none") for turns in DEPTHS), *((4, mask) for mask in MASKS)]:
        real = MASKS[mask]
        mine, theirs = (
            each(ids, attention_mask=real, turns=turns).logits for each in (native, other)
        )
        seen = torch.ones_like(ids).bool() if real is None else real.bool()
        assert relative_error(theirs[seen], mine[seen]) <= SINGLE


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", MAIN)
@torch.no_grad()
def test_a_pass_under_eager_attention_is_the_native_one(name, mask):
    native, other = pair(name, 2)
    try:
        for each in (native, other):
            each.set_attn_implementation("eager")
        assert other.model.stem.config._attn_implementation == "eager"
        assert_same_states(native, other, tokens(B, S), MASKS[mask], turns=2)
    finally:
        for each in (native, other):
            each.set_attn_implementation("sdpa")


@torch.no_grad()
def test_without_a_word_on_the_turns_the_configuration_counts():
    native, other = pair()
    _, theirs = assert_same_states(native, other, tokens(B, S))
    assert len(theirs.hidden_states) == 4
    assert not torch.allclose(other(tokens(B, S), turns=4).logits, theirs.logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere", "gpt2"])
@torch.no_grad()
def test_a_load_in_16_bits_is_the_native_one(name, dtype):
    native, other = pair(name, 2, dtype)
    ids = tokens(1, 120)
    dtypes = [{n: x.dtype for n, x in each.state_dict().items()} for each in (native, other)]
    assert dtypes[0] == dtypes[1]
    assert set(dtypes[1].values()) == {dtype}
    for (a, x), (b, y) in zip(native.named_buffers(), other.named_buffers(), strict=True):
        assert a == b
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
    assert torch.equal(other(ids).logits, native(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_positions_that_restart_are_packed_documents(name):
    native, other = pair(name, 2)
    ids = tokens(2, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0]])
    mine, theirs = (each(ids, position_ids=positions, labels=ids) for each in (native, other))
    torch.testing.assert_close(theirs.logits, mine.logits, **EXACT)
    torch.testing.assert_close(theirs.loss, mine.loss, **EXACT)
    torch.testing.assert_close(theirs.logits[:1, 3:], other(ids[:1, 3:]).logits, **EXACT)
    assert theirs.get(portable.CACHE) is None
    with pytest.raises(ValueError, match="use_cache: expected False for packed documents"):
        other(ids, position_ids=positions, use_cache=True)


@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_what_rests_takes_no_further_turn_as_in_the_native_model(mask, per):
    native, other = resting()
    how = {"turns": 9, "tol": 0.05, "tol_per": per}
    _, theirs = assert_same_states(native, other, tokens(B, S), MASKS[mask], **how)
    taken = theirs.turns[:, -1]
    assert 1 < int(theirs.turns.float().mean()) < 9
    if mask == "none" and per == "token":
        assert len(taken.unique()) > 1
    slots = theirs.get(portable.CACHE).layers
    assert len(slots) == 2 + 9


# -- the cache


@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize(("name", "setting"), CASES)
@torch.no_grad()
def test_a_cache_changes_nothing(name, setting, mask):
    dtype, bound = (torch.float32, 2e-6) if name in IN_FP32 else (torch.float64, 1e-12)
    _, other = pair(name, setting, dtype)
    ids, real = tokens(B, S), MASKS[mask]
    whole = other(ids, attention_mask=real, use_cache=False).logits
    held, step = None, 0
    for length in (4, 3, 1, 1):
        part = slice(step, step + length)
        seen = None if real is None else real[:, : part.stop]
        out = other(ids[:, part], attention_mask=seen, past_key_values=held, use_cache=True)
        kept = torch.ones(B, length).bool() if seen is None else seen[:, part].bool()
        assert relative_error(out.logits[kept], whole[:, part][kept]) <= bound
        held, step = out[portable.CACHE], part.stop
    assert len(held.layers) == 2 + 3 * 2
    assert held.get_seq_length() == S


def test_a_cache_keeps_its_number_of_turns():
    check_cache_keeps_its_turns(pair()[1], portable, "LoopedDecoderCache")


# -- generation


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"turns": 6}, {"num_beams": 2}, {"turns": 6, "tol": 0.2}],
)
@pytest.mark.parametrize("name", MAIN)
def test_the_same_tokens_are_generated(name, options):
    native, other = pair(name, 3, torch.float32)
    ids, real = left_padded(tokens(B, S), 9, 6, 2)
    mine, theirs = (
        greedy(each, ids, new=10, attention_mask=real, **options) for each in (native, other)
    )
    assert torch.equal(theirs, mine)
    assert len(set(mine.flatten().tolist())) > 3


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_generation_rests_as_the_native_one(per):
    native, other = resting()
    ids, real = left_padded(tokens(B, S), 9, 6, 2)
    how = {"attention_mask": real, "turns": 9, "tol": 0.05, "tol_per": per}
    assert torch.equal(greedy(other, ids, **how), greedy(native, ids, **how))


@pytest.mark.parametrize(
    ("stored", "given", "call"),
    [
        ({"turns": 6}, {}, {}),
        ({}, {"turns": 6}, {}),
        ({"turns": 1}, {"turns": 6}, {}),
        ({"turns": 6, "tol": 0.3, "tol_per": "token"}, {}, {}),
        ({"turns": 1, "tol": 0.3}, {"tol": 0.0}, {"turns": 6}),
    ],
)
def test_generation_settings_say_the_depth_as_of_the_native_model(stored, given, call):
    ids, found = tokens(1, 5), []
    for each in resting():
        kept = each.generation_config
        try:
            each.generation_config = copy.deepcopy(kept)
            vars(each.generation_config).update(stored)
            if given:
                call = call | {"generation_config": GenerationConfig(**given)}
            found.append(greedy(each, ids, new=8, **call).tolist())
            assert {n: vars(each.generation_config)[n] for n in stored} == stored
        finally:
            each.generation_config = kept
    assert found[0] == found[1]


def test_noise_is_drawn_for_the_places_of_a_call_alone(monkeypatch):
    """And is a row of the table of all places, to the bit."""
    table, drawn = torch.cat([portable._noise_block(i, 8) for i in range(40)]), []
    for positions in ([[0, 1, 2]], [[2559]], [[63, 64, 0, 0], [2000, 65, 64, 1]]):
        places = torch.tensor(positions)
        assert torch.equal(portable._placed_noise(places, 8), table[places])
    block = portable._noise_block
    monkeypatch.setattr(
        portable, "_noise_block", lambda i, *rest: drawn.append(i) or block(i, *rest)
    )
    portable._placed_noise(torch.tensor([[130, 2559], [128, 191]]), 8)
    assert drawn == [2, 39]


@pytest.mark.parametrize("way", [{"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 2}])
def test_drafts_change_no_token(way):
    _, other = pair("llama", 3, torch.float32)
    ids, how = tokens(1, 7), {"turns": 6, "new": 10, "eos_token_id": 2}
    assert torch.equal(greedy(other, ids, **how, **way), greedy(other, ids, **how))


def test_an_assistant_thinks_as_deep_as_it_says():
    _, other = pair("llama", 3, torch.float32)
    ids, plain = tokens(1, 7), decoder("llama", torch.float32)
    made = greedy(other, ids, turns=6, assistant_model=plain)
    assert torch.equal(made, greedy(other, ids, turns=6))


def test_turns_of_a_load_are_those_of_the_configuration():
    native, _ = pair(dtype=torch.float32)
    other = portable.LoopedDecoderForCausalLM.from_pretrained(folder(), turns=6, tol=0.0)
    assert torch.equal(greedy(other, tokens(1, 5)), greedy(native, tokens(1, 5), turns=6))


def test_continuous_batching_is_refused():
    with pytest.raises(NotImplementedError, match="generate_batch: expected generate"):
        pair()[1].generate_batch([[5, 6]], max_new_tokens=2)


# -- the loss, and mistakes


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere"])
def test_the_loss_is_the_native_one(name):
    native, other = pair(name)
    ids, real = tokens(B, S), MASKS["right"]
    labels = ids.masked_fill(~real.bool(), -100)
    labels[0, 4] = -100
    for given, count in ((labels, None), (ids, None), (labels, 7), (labels, torch.tensor(50))):
        call = {"attention_mask": real, "labels": given, "num_items_in_batch": count}
        mine, theirs = (each(ids, **call) for each in (native, other))
        torch.testing.assert_close(theirs.loss, mine.loss, **EXACT)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"turns": 0}, ValueError, "turns: expected an integer of at least 1, got 0"),
        ({"turns": 2.5}, ValueError, "turns: expected an integer of at least 1, got 2.5"),
        ({"tol": -1.0}, ValueError, "tol: expected a number of 0 or more, got -1.0"),
        ({"tol": True}, ValueError, "tol: expected a number of 0 or more, got True"),
        ({"tol_per": "word"}, ValueError, "tol_per: expected sequence or token, got 'word'"),
        ({"attention_mask": torch.ones(1, 3)}, ValueError, "attention_mask: expected .1, 4."),
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
        ({"total_ut_steps": 0}, "total_ut_steps: expected at least 1, got 0"),
        ({"block": 9}, "prelude, block, coda: expected counts that make up the 4 layers"),
        ({"injection": "sum"}, "injection: expected one of none, add, adapter, got 'sum'"),
        ({"state": "zero"}, "state: expected one of prelude, noise, learned, got 'zero'"),
        ({"state": "noise"}, "injection: expected add or adapter with state 'noise'"),
        (
            {"injection": "adapter", "adapter_start": "zero"},
            "adapter_start: expected one of None, state, inputs, got 'zero'",
        ),
        ({"adapter_start": "inputs"}, "adapter_start: expected none with injection none"),
    ],
)
def test_settings_that_have_no_meaning_are_named(fields, message):
    config = portable.LoopedDecoderConfig.from_pretrained(folder(), **fields)
    with pytest.raises(ValueError, match=message):
        portable.LoopedDecoderModel(config)


@pytest.mark.parametrize("state", ["prelude", "noise", "learned"])
@pytest.mark.parametrize("start", [None, "state", "inputs"])
def test_a_fresh_adapter_starts_as_the_native_one(state, start):
    place = folder("llama", 0)
    given = {"injection": "adapter", "state": state, "adapter_start": start}
    weights = [
        kinds[1](kinds[0].from_pretrained(place, **given)).model.adapter.linear.weight
        for kinds in (
            (LoopedDecoderConfig, LoopedDecoderForCausalLM),
            (portable.LoopedDecoderConfig, portable.LoopedDecoderForCausalLM),
        )
    ]
    assert torch.equal(*weights)
    as_state = start == "state" or (start is None and state == "prelude")
    halves = weights[0].chunk(2, 1)
    assert torch.equal(halves[0 if as_state else 1], torch.eye(WIDTH))
    assert not halves[1 if as_state else 0].any()


def test_weights_that_are_missing_are_named():
    kind = portable.LoopedDecoderForCausalLM
    _, info = kind.from_pretrained(folder(), output_loading_info=True)
    assert not info["missing_keys"]
    with pytest.raises(ValueError, match=r"got none of 1, such as model\.norm_between\.weight"):
        kind.from_pretrained(folder(), norm_between=True)


def test_a_decoder_that_this_transformers_lacks_is_named():
    with pytest.raises(ValueError, match=r"decoder: expected a model_type that .* got 'llama9'"):
        portable.LoopedDecoderConfig({"model_type": "llama9", "num_hidden_layers": 3})


# -- the folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    place = tmp_path_factory.mktemp("portable") / "looped"
    words = ["export", str(folder("gemma3", 2)), str(place), "--portable", "--turns", "6"]
    assert main(words) == 0
    return place


def test_the_folder_is_that_of_a_plain_export_with_code_beside_it(exported, tmp_path):
    plain = export_run(folder("gemma3", 2), tmp_path / "plain", turns=6)
    files = {path.name for path in exported.iterdir()}
    assert files == {path.name for path in plain.iterdir()} | {f"{CODE}.py"}
    config = json.loads((exported / "config.json").read_text())
    assert config.pop("auto_map") == {
        "AutoConfig": f"{CODE}.LoopedDecoderConfig",
        "AutoModel": f"{CODE}.LoopedDecoderModel",
        "AutoModelForCausalLM": f"{CODE}.LoopedDecoderForCausalLM",
    }
    assert config == json.loads((plain / "config.json").read_text())
    for name in files - {"config.json", f"{CODE}.py"}:
        assert (exported / name).read_bytes() == (plain / name).read_bytes()
    assert holds_code(exported, CODE)
    assert not holds_code(plain, CODE)


def test_here_the_folder_opens_as_the_native_model(exported, tmp_path):
    """Its code is not run, and what is saved from it or exported again does not point to it."""
    config = AutoConfig.from_pretrained(exported)
    native = AutoModelForCausalLM.from_pretrained(exported)
    assert type(native) is LoopedDecoderForCausalLM
    assert type(AutoModel.from_config(config)) is LoopedDecoderModel
    native.save_pretrained(tmp_path / "saved")
    export_run(exported, tmp_path / "again")
    for name in ("saved", "again"):
        assert "auto_map" not in json.loads((tmp_path / name / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_of_an_export_is_kept(dtype, tmp_path):
    export_run(folder("llama", 3), tmp_path / "out", dtype=dtype, portable=True)
    other = portable.LoopedDecoderForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in other.parameters()} == {dtype}


def test_a_decoder_of_other_code_has_no_such_folder(tmp_path):
    class OwnConfig(LlamaConfig):
        model_type = "own_llama"

    class Own(LlamaForCausalLM):
        config_class = OwnConfig

    AutoConfig.register("own_llama", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, Own)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    decoder = Own(OwnConfig(num_hidden_layers=3, vocab_size=11, **sizes))
    LoopedDecoderForCausalLM.from_decoder(decoder).save_pretrained(tmp_path / "own")
    with pytest.raises(
        ValueError,
        match=r"portable: expected a model of transformers' own parts.*"
        r"got test_looped_decoder_portable\.OwnConfig",
    ):
        export_run(tmp_path / "own", tmp_path / "out", portable=True)
    assert not (tmp_path / "out").exists()
    export_run(tmp_path / "own", tmp_path / "out")


CALLS = """
import json
import torch
from transformers import AutoModel, AutoModelForCausalLM

folder, saved, real = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[4]))
ids = torch.tensor(json.loads(sys.argv[3]))
options = {"trust_remote_code": True, "dtype": torch.float32}
net = AutoModelForCausalLM.from_pretrained(folder, **options)
net.save_pretrained(saved)  # its code goes along
again = AutoModelForCausalLM.from_pretrained(saved, turns=6, **options)
body = AutoModel.from_pretrained(folder, **options)
how = {"attention_mask": real, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
how["pad_token_id"] = 0
with torch.no_grad():
    print(json.dumps({
        "classes": [type(x).__name__ for x in (net, body, net.config)],
        "modules": sorted({type(x).__module__.split(".")[-1] for x in (net, body, net.config)}),
        "turns": [net.config.total_ut_steps, again.config.turns],
        "logits": {
            str(turns): net(ids, attention_mask=real, turns=turns).logits.tolist()
            for turns in (1, 4, 9, None)
        },
        "states": body(ids, attention_mask=real).last_hidden_state.tolist(),
        "tokens": net.generate(ids, **how).tolist(),
        "uncached": net.generate(ids, use_cache=False, **how).tolist(),
        "again": again.generate(ids, **how).tolist(),
        "ours": sorted(name for name in sys.modules if name.startswith("stars_fast")),
    }))
"""
FOLDERS = [("llama", 1), ("gemma3", 2), ("olmo2", 0), ("gpt2", 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), FOLDERS)
@torch.no_grad()
def test_the_folder_opens_where_this_package_is_not(name, setting, tmp_path):
    place = export_run(folder(name, setting), tmp_path / "out", portable=True)
    ids, real = left_padded(tokens(B, S), 9, 6, 2)
    words = (place, tmp_path / "saved", json.dumps(ids.tolist()), json.dumps(real.tolist()))
    said = alone(CALLS, *words)
    native = LoopedDecoderForCausalLM.from_pretrained(place, dtype=torch.float32)
    seen = real.bool()
    for turns in (*map(str, DEPTHS), "None"):
        depth = None if turns == "None" else int(turns)
        out = native(ids, attention_mask=real, turns=depth)
        assert relative_error(torch.tensor(said["logits"][turns])[seen], out.logits[seen]) <= SINGLE
    states = native.model(ids, attention_mask=real).last_hidden_state
    assert relative_error(torch.tensor(said["states"])[seen], states[seen]) <= SINGLE
    made = greedy(native, ids, new=8, attention_mask=real).tolist()
    assert [row[S:] for row in said["tokens"]] == [row[S:] for row in said["uncached"]] == made
    six = greedy(native, ids, new=8, attention_mask=real, turns=6).tolist()
    assert [row[S:] for row in said["again"]] == six
    assert said["classes"] == [f"LoopedDecoder{x}" for x in ("ForCausalLM", "Model", "Config")]
    assert (said["modules"], said["ours"]) == ([CODE], [])
    assert said["turns"] == [3, 6]
    assert (tmp_path / "saved" / f"{CODE}.py").exists()
