"""Decoders of several architectures, looped: values, cache, files, options and errors."""

import copy
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")

import fresh
import huginn_models
import ouro_models
import transformers
from decoder_models import DECODERS, LAYERS, MORE, WIDTH, decoder, left_padded, tokens
from oracle import KeepDouble
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from stars_fast.data.tiny_tokenizer import train_tokenizer, write_tokenizer
from stars_fast.models.cast import cast
from stars_fast.models.export import export_run
from stars_fast.models.families.looped_decoder import LoopedDecoderLoop
from stars_fast.models.huginn.retrofit import retrofit
from stars_fast.models.looped_block import looped_block
from stars_fast.models.looped_decoder import (
    LoopedDecoderCache,
    LoopedDecoderConfig,
    LoopedDecoderForCausalLM,
    LoopedDecoderModel,
    count_turns,
)
from stars_fast.models.portable import modeling_looped_decoder_portable as portable
from stars_fast.models.saved import find_model, load_model
from stars_fast.tokens import Tokens

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SETTINGS = [
    {},
    {"injection": "add"},
    {"injection": "adapter", "state": "noise", "norm_between": True, "adapter_start": "state"},
    {"injection": "adapter", "state": "learned", "norm_between": True},
]


def looped(name="llama", dtype=torch.float64, **options):
    """A looped decoder whose loop is not at its start."""
    model = LoopedDecoderForCausalLM.from_decoder(decoder(name, dtype), **options)
    generator = torch.Generator().manual_seed(2)
    for part in (model.model.adapter, model.model.learned, model.model.norm_between):
        for p in [] if part is None else part.parameters():
            p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def greedy(model, ids, new=6, **options):
    """New tokens alone; no token stops."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(ids, max_new_tokens=new, **options)[:, ids.shape[1] :]


# -- once through all layers


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS | MORE)
@pytest.mark.parametrize("padded", [False, True])
def test_looped_once_is_the_original(name, padded):
    original = decoder(name, torch.float32)
    ids, mask = left_padded(tokens(2, 12), 12, 7)
    given = {"attention_mask": mask} if padded else {}
    if padded:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    expected = original(ids, **given).logits
    found = LoopedDecoderForCausalLM.from_decoder(original, prelude=1, block=2, coda=1)
    given.pop("position_ids", None)  # ours follow from the mask
    got = found(ids, turns=1, **given).logits
    real = mask.bool() if padded else torch.ones_like(ids, dtype=torch.bool)
    torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found(ids, turns=2, **given).logits[real], expected[real], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"injection": "adapter"},
        {"injection": "adapter", "state": "noise"},
        {"injection": "adapter", "state": "learned"},
        {"injection": "adapter", "adapter_start": "inputs"},
        {"injection": "add", "state": "learned"},
        {"prelude": 0, "coda": 0},
        {"prelude": 2, "coda": 1, "layers": range(LAYERS)},
    ],
)
def test_a_loop_starts_as_the_original(options):
    original, ids = decoder("qwen3", torch.float32), tokens(2, 9)
    model = LoopedDecoderForCausalLM.from_decoder(original, **options)
    expected = original(ids).logits
    torch.testing.assert_close(model(ids, turns=1).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("state", ["prelude", "noise", "learned"])
def test_an_adapter_starts_as_the_inputs_or_as_the_state(state):
    """As the inputs, a turn is the first one again, whatever its state; as the state, turns are
    those without an adapter."""
    original, ids = decoder("llama"), tokens(2, 9)
    given = {"injection": "adapter", "state": state}

    def states(**options):
        model = LoopedDecoderForCausalLM.from_decoder(original, **options)
        return model(ids, turns=3, output_hidden_states=True).hidden_states

    plain = states()
    for place, h in enumerate(states(adapter_start="inputs", **given)[1:], start=1):
        torch.testing.assert_close(h, plain[1], **CLOSE, msg=f"turn {place}")
    kept = LoopedDecoderForCausalLM.from_decoder(original, adapter_start="state", **given)
    out = kept(ids, turns=3, output_hidden_states=True).hidden_states
    context = kept.model.prepare(out[0], inputs=torch.full_like(out[0], torch.nan))
    kept.model.adapter = None
    kept.config.injection = "none"
    for before, after in pairwise(out):
        torch.testing.assert_close(kept.model.turn(before, context), after, **CLOSE)
    if state == "prelude":
        torch.testing.assert_close(out, plain, **CLOSE)


@torch.no_grad()
def test_layers_are_dropped_by_name():
    original, ids = decoder("gemma3"), tokens(2, 9)
    short = copy.deepcopy(original)
    model = LoopedDecoderForCausalLM.from_decoder(original, layers=[0, 3, 1])
    assert model.config.parts == ([0], [3], [1])
    short.model.layers = torch.nn.ModuleList(short.model.layers[i] for i in (0, 3, 1))
    short.config.layer_types = [short.config.layer_types[i] for i in (0, 3, 1)]
    short.config.num_hidden_layers = 3
    expected = short(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, turns=1, use_cache=False).logits, expected, **CLOSE)


@torch.no_grad()
def test_turns_repeat_the_block():
    original, ids = decoder("llama"), tokens(2, 9)
    unrolled = copy.deepcopy(original)
    order = [0, 1, 2, 1, 2, 1, 2, 3]
    unrolled.model.layers = torch.nn.ModuleList(original.model.layers[i] for i in order)
    unrolled.config.num_hidden_layers = len(order)
    expected = unrolled(ids, use_cache=False).logits
    model = LoopedDecoderForCausalLM.from_decoder(original)
    out = model(ids, turns=3, output_hidden_states=True)
    torch.testing.assert_close(out.logits, expected, **CLOSE)
    assert len(out.hidden_states) == 4
    assert torch.equal(out.turns, torch.full((2, 9), 3))


@torch.no_grad()
def test_the_original_goes_on_as_it_was():
    original, ids = decoder("gpt2"), tokens(2, 9)
    before = original(ids).logits
    model = LoopedDecoderForCausalLM.from_decoder(original)
    model(ids, turns=3)
    assert torch.equal(original(ids).logits, before)
    assert model.model.block[0] is original.transformer.h[1]


def test_the_loss_is_transformers():
    original, ids = decoder("gemma2", torch.float32), tokens(2, 9)
    model = LoopedDecoderForCausalLM.from_decoder(original)
    labels = ids.masked_fill(torch.arange(9) < 3, -100)
    expected = original(ids, labels=labels).loss
    torch.testing.assert_close(model(ids, labels=labels, turns=1).loss, expected)
    plain = decoder("olmo2", torch.float32)
    found = LoopedDecoderForCausalLM.from_decoder(plain)(ids, labels=labels, turns=1).loss
    torch.testing.assert_close(found, plain(ids, labels=labels).loss)


@pytest.mark.parametrize("kind", ["ouro", "huginn", "looped"])
def test_the_loss_of_padded_rows_is_that_of_the_rows(kind):
    """No more and no less: the last pad on the left foretells nothing, and the first token of a
    row is no target."""
    make = {"ouro": ouro_models.model, "huginn": huginn_models.model, "looped": looped}
    model, (ids, mask) = make[kind](), left_padded(tokens(2, 9), 9, 6)
    labels = ids.masked_fill(mask == 0, -100)
    alone = [
        model(ids[i : i + 1, -n:], labels=ids[i : i + 1, -n:], num_items_in_batch=1).loss
        for i, n in enumerate((9, 6))
    ]
    found = model(ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(found, sum(alone) / (8 + 5), **CLOSE)


def test_a_router_s_loss_is_refused_rather_than_left_out():
    model = LoopedDecoderForCausalLM.from_decoder(
        decoder("olmoe", torch.float32, output_router_logits=True)
    )
    ids = tokens(1, 5)
    assert model(ids, turns=1).logits.isfinite().all()
    with pytest.raises(ValueError, match="output_router_logits: expected False with labels"):
        model(ids, labels=ids, turns=1)


# -- the cache


WINDOWED = ["olmo3", "cohere2", "gpt_neo", "gemma2"]
"""Whose windows are shorter than the sequence; full attention between them."""


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "turns"),
    [(name, turns) for name in DECODERS for turns in (1, 4, 9)]
    + [(name, 3) for name in (*WINDOWED, "falcon", "codegen")],
)
def test_decoding_with_a_cache_is_a_new_prefill(name, turns):
    model, ids = looped(name), tokens(2, 12)
    cache, found = None, []
    with KeepDouble():
        whole = model(ids, turns=turns, use_cache=False).logits
        for a, b in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 11), (11, 12)):
            out = model(ids[:, a:b], turns=turns, cache=cache, use_cache=True)
            cache = out.get("cache", out.get("past_key_values"))
            found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, **CLOSE)
    assert len(cache.layers) == 2 + 2 * turns
    assert cache.get_seq_length() == 12


@torch.no_grad()
@pytest.mark.parametrize("name", [*WINDOWED, "gemma3", "mistral"])
def test_each_turn_has_its_windows(name):
    """As in the decoder's own code over its layers written out turn by turn."""
    original, ids = decoder(name), tokens(2, 12)
    found = LoopedDecoderForCausalLM.from_decoder(original)(ids, turns=3, use_cache=False).logits
    unrolled, order = copy.deepcopy(original), [0, 1, 2, 1, 2, 1, 2, 3]
    stack = unrolled.base_model
    held = "h" if hasattr(stack, "h") else "layers"
    setattr(stack, held, torch.nn.ModuleList(getattr(stack, held)[i] for i in order))
    if kinds := getattr(unrolled.config, "layer_types", None):
        unrolled.config.layer_types = [kinds[i] for i in order]
    unrolled.config.num_hidden_layers = len(order)
    torch.testing.assert_close(found, unrolled(ids, use_cache=False).logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("turns", [1, 4])
def test_generation_with_a_cache_is_that_without(options, turns):
    model = looped("llama", **options)
    ids, mask = left_padded(tokens(2, 9), 9, 6)
    given = {"attention_mask": mask, "turns": turns}
    with_cache = greedy(model, ids, **given)
    assert torch.equal(with_cache, greedy(model, ids, use_cache=False, **given))
    for row, length in ((0, 9), (1, 6)):
        alone = greedy(model, ids[row : row + 1, -length:], turns=turns)
        assert torch.equal(with_cache[row : row + 1], alone)


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_pads_on_the_left_change_nothing(name):
    model, ids = looped(name), tokens(1, 7)
    expected = model(ids, turns=3).logits
    wide = torch.cat((tokens(1, 4, seed=1), ids), 1)
    mask = (torch.arange(11) >= 4).long()[None]
    torch.testing.assert_close(
        model(wide, attention_mask=mask, turns=3).logits[:, 4:], expected, **CLOSE
    )


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_packed_documents_are_as_if_alone(name):
    model, ids = looped(name), tokens(1, 9)
    cu = torch.tensor([0, 5, 9])
    alone = [model(part, turns=2).logits for part in ids.split((5, 4), 1)]
    torch.testing.assert_close(
        model(ids, turns=2, cu_seqlens=cu).logits, torch.cat(alone, 1), **CLOSE
    )


@torch.no_grad()
def test_a_sequence_that_rests_takes_no_further_turn():
    model, ids = looped("llama", injection="adapter"), tokens(3, 9)
    state, inputs = model.model.adapter.linear.weight.chunk(2, 1)
    state.mul_(0.3)  # so that states come to rest
    inputs.add_(torch.eye(WIDTH))
    tol = 0.2
    out = model(ids, turns=9, tol=tol, use_cache=True)
    taken = out.turns[:, 0]
    assert int(taken.min()) > 1
    assert int(taken.max()) < 9
    for row, turns in enumerate(taken.tolist()):
        expected = model(ids[row : row + 1], turns=turns).logits
        torch.testing.assert_close(out.logits[row : row + 1], expected, **CLOSE)
    cache = out.get("cache", out.get("past_key_values"))
    assert len(cache.layers) == 2 + 2 * 9
    with count_turns(model) as count:
        greedy(model, ids, turns=9, tol=tol)
    assert 1 < count.per_token < 9


def test_noise_is_drawn_anew_in_training_alone():
    model, ids = looped("llama", injection="add", state="noise", state_std=1.0), tokens(1, 5)
    assert torch.equal(model(ids, turns=2).logits, model(ids, turns=2).logits)
    model.train()
    assert not torch.allclose(model(ids, turns=2).logits, model(ids, turns=2).logits)


@pytest.mark.parametrize("name", ["llama", "olmo2", "gpt_neox"])
def test_a_window_that_the_code_does_not_read_changes_nothing(name):
    """As of a Mistral that was converted to Llama and has kept the key."""
    original, ids = decoder(name, sliding_window=3), tokens(2, 12)
    with torch.no_grad():
        expected = original(ids).logits
        found = LoopedDecoderForCausalLM.from_decoder(original)(ids, turns=1).logits
        base = original.base_model
        turn = looped_block(base, norm=True)(base.get_input_embeddings()(ids))
        last = base(ids).last_hidden_state
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(turn, last)


def test_noise_of_a_sample_follows_from_its_seed():
    model = looped("llama", injection="add", state="noise", state_std=0.5).train()
    loop = LoopedDecoderLoop(model)
    ids = tokens(2, 5)
    rows = loop.begin(ids, Tokens(2, 5), seeds=[3, 4])
    again = loop.begin(ids, Tokens(2, 5), seeds=[3, 4])
    alone = loop.begin(ids[1:], Tokens(1, 5), seeds=[4])
    assert torch.equal(rows.state, again.state)
    assert torch.equal(rows.state[1:], alone.state)
    bounds = torch.tensor([0, 5, 10])
    packed = loop.begin(ids.view(1, 10), Tokens(1, 10, cu_seqlens=bounds), seeds=[3, 4])
    assert torch.equal(packed.state.view(2, 5, -1), rows.state)
    assert not torch.equal(rows.state[0], rows.state[1])


# -- training


@pytest.mark.parametrize("name", DECODERS)
def test_gradient_checkpointing_changes_no_gradient(name):
    model, ids = looped(name, injection="adapter"), tokens(2, 9)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for part in model.model.block:
        if hasattr(part, "attn"):  # GPT-2 has dropout
            part.attn.attn_dropout.p = 0.0
    model.train()
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(ids, labels=ids, turns=3, use_cache=recompute or None).loss.backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters()})
    for key, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], grad, **CLOSE)


@pytest.mark.parametrize("options", SETTINGS)
def test_every_parameter_has_a_gradient(options):
    model, ids = looped("gemma3", **options), tokens(2, 9)
    model(ids, labels=ids, turns=2).loss.backward()
    assert not [key for key, p in model.named_parameters() if p.grad is None]


# -- files

IN_A_FRESH_PROCESS = """
import sys, torch
from transformers import AutoModelForCausalLM
import stars_fast.models.looped_decoder
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids, mask, expected = torch.load(folder + "/expected.pt")
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert torch.equal(found, expected), folder
"""


@pytest.mark.slow
@torch.no_grad()
def test_a_saved_model_is_the_same_in_a_fresh_process(tmp_path):
    for i, name in enumerate(DECODERS):
        model = looped(name, torch.float32, turns=3, **SETTINGS[i % len(SETTINGS)])
        model.save_pretrained(tmp_path / name)
        ids, mask = left_padded(tokens(2, 9), 9, 6)
        expected = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        torch.save((ids, mask, expected), tmp_path / name / "expected.pt")
    fresh.said(IN_A_FRESH_PROCESS, *(tmp_path / name for name in DECODERS))


@torch.no_grad()
@pytest.mark.parametrize("options", SETTINGS)
def test_settings_come_back_with_the_weights(options, tmp_path):
    model, ids = looped("gemma3", torch.float32, turns=3, layers=[0, 2, 3], **options), tokens(2, 9)
    model.save_pretrained(tmp_path)
    again = LoopedDecoderForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, model(ids, turns=3).logits)
    assert again.lm_head.weight is again.get_input_embeddings().weight
    names = "layers", "prelude", "block", "coda", "injection", "state", "adapter_start"
    for name in (*names, "norm_between", "turns"):
        assert getattr(again.config, name) == getattr(model.config, name), name
    before, after = (each.config.decoder.to_dict() | {"dtype": None} for each in (model, again))
    assert before == after
    config = AutoConfig.from_pretrained(tmp_path, turns=5)
    assert isinstance(config, LoopedDecoderConfig)
    assert config.total_ut_steps == 5
    headless = AutoModel.from_pretrained(tmp_path)
    assert isinstance(headless, LoopedDecoderModel)
    states = headless(ids).last_hidden_state
    torch.testing.assert_close(states, model.model(ids, turns=3).last_hidden_state)
    made = AutoModelForCausalLM.from_config(config)
    assert made.state_dict().keys() == model.state_dict().keys()
    assert made(ids).logits.isfinite().all()


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    model = looped("llama", torch.float32, injection="adapter")
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"1 keys are missing: model\.norm_between\.weight"):
        LoopedDecoderForCausalLM.from_pretrained(tmp_path / "whole", norm_between=True)
    with pytest.raises(ValueError, match=r"1 keys are not expected: model\.adapter"):
        LoopedDecoderForCausalLM.from_pretrained(tmp_path / "whole", injection="none")
    decoder("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"is no looped model.*got 'llama'"):
        LoopedDecoderForCausalLM.from_pretrained(tmp_path / "llama")


def test_sizes_that_are_set_are_the_decoder_s(tmp_path):
    looped("llama", torch.float32).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, max_position_embeddings=1024)
    assert model.config.decoder.max_position_embeddings == 1024
    model.config.vocab_size = 400
    assert model.config.decoder.vocab_size == model.config.vocab_size == 400


def test_standard_sizes_are_the_decoder_s():
    """Those with one meaning: how many layers there are has several."""
    config = looped("llama", torch.float32).config
    for each in (config, portable.LoopedDecoderConfig(**config.to_dict())):
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"):
            assert getattr(each, name) == getattr(each.decoder, name), name
        assert not hasattr(each, "num_hidden_layers")
        assert "head_dim" not in each.to_diff_dict()
    without = LoopedDecoderConfig(decoder=transformers.GPT2Config(n_layer=3))
    assert not hasattr(without, "num_key_value_heads")


def test_an_export_stops_where_a_message_ends(tmp_path):
    """As the tokenizer marks it, besides where the decoder stopped."""
    model = looped("llama", torch.float32)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", train_tokenizer(320), 512)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    export_run(tmp_path / "model", tmp_path / "out")
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.eos_token_id == [0, end]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_leave_in_fp32_what_transformers_does(tmp_path, dtype):
    """Routers of mixtures of experts; the values too, which a way through 16 bits would round."""
    model = looped("deepseek_v3", torch.float32)
    model.save_pretrained(tmp_path)
    expected = LoopedDecoderForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    dtypes = {tensor.dtype for tensor in expected.values()}
    assert dtypes == {dtype, torch.float32}
    for found in (cast(model, dtype), load_model(find_model(str(tmp_path)), dtype)):
        for name, tensor in found.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_gradients_of_what_stays_in_fp32_do_too():
    class Routed(torch.nn.Module):
        _keep_in_fp32_modules_strict = ("router",)

        def __init__(self):
            super().__init__()
            self.router, self.rest = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)

    model = Routed()
    model.rest(model.router(torch.randn(3, 4))).square().sum().backward()
    expected = model.router.weight.grad.clone()
    cast(model, torch.bfloat16)
    for p in model.parameters():
        assert p.grad.dtype == p.dtype
    assert torch.equal(model.router.weight.grad, expected)
    assert model.rest.weight.grad.dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "cohere", "gemma3"])
def test_16_bits_leave_the_rotary_frequencies_alone(tmp_path, name):
    """However a model comes to be in bf16, it is what transformers loads in bf16."""
    model, ids = looped(name, torch.float32, injection="adapter", state="noise"), tokens(1, 200)
    model.save_pretrained(tmp_path)
    expected = LoopedDecoderForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    loaded = load_model(find_model(str(tmp_path)), torch.bfloat16)
    for found in (cast(model, torch.bfloat16), loaded):
        assert found.lm_head.weight.dtype == torch.bfloat16
        tables = [name for name, _ in found.named_buffers() if "inv_freq" in name]
        assert tables
        for table in tables:
            same = [each.get_buffer(table) for each in (found, expected)]
            torch.testing.assert_close(*same, rtol=0, atol=0)
        assert torch.equal(found(ids, turns=3).logits, expected(ids, turns=3).logits)


# -- mistakes


def no_decoders():
    small = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 48}
    bert = transformers.BertConfig(**small, num_hidden_layers=2)
    t5 = transformers.T5Config(d_model=WIDTH, num_layers=1, d_ff=32, num_heads=2, vocab_size=20)
    mamba = transformers.MambaConfig(hidden_size=WIDTH, num_hidden_layers=2, vocab_size=20)
    return {
        "expected a causal language model .*got Linear": torch.nn.Linear(2, 2),
        "expected a decoder, got T5ForCond.*, which has an enc": (
            transformers.T5ForConditionalGeneration(t5)
        ),
        "expected a BertLMHeadModel, got BertForMaskedLM": transformers.BertForMaskedLM(bert),
        "expected a BertLMHeadModel, got BertModel": transformers.BertModel(bert),
        "expected a LlamaForCausalLM, got LlamaModel": decoder("llama").model,
        "got MambaModel": transformers.MambaForCausalLM(mamba),
        "expected a decoder that does not loop yet, got LoopedDecoderForCausalLM": looped(),
        "expected a decoder that does not loop yet, got OuroForCausalLM": ouro_models.model(),
        "expected a decoder that does not loop yet, got HuginnForCausalLM": huginn_models.model(),
    }


@pytest.mark.parametrize("key", ["num_loops", "total_ut_steps", "num_recurrence"])
def test_a_loop_that_the_decoder_does_not_run_is_named(key):
    model = decoder("llama", **{key: 2})
    for make in (
        LoopedDecoderForCausalLM.from_decoder,
        lambda model: retrofit(model, [0], [1, 2], [3]),
    ):
        with pytest.raises(ValueError, match=f"got {key}=2, which LlamaConfig does not read"):
            make(model)
    setattr(model.config, key, 1)
    assert LoopedDecoderForCausalLM.from_decoder(model).config.total_ut_steps == 4


def test_a_model_that_does_not_run_is_named():
    class Broken(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            raise RuntimeError("no kernel")

    model = Broken(decoder("llama").config)
    with pytest.raises(TypeError, match=r"on tokens alone, got Broken, which fails with .*: no k"):
        LoopedDecoderForCausalLM.from_decoder(model)


def test_what_is_no_decoder_is_refused():
    for message, model in no_decoders().items():
        with pytest.raises(TypeError, match=message):
            LoopedDecoderForCausalLM.from_decoder(model)


def test_an_architecture_that_is_not_understood_is_refused():
    class Louder(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.5
            return out

    model = Louder(decoder("llama").config)
    with pytest.raises(TypeError, match=r"got Louder: its parts .*relative error 3\.3e-01"):
        LoopedDecoderForCausalLM.from_decoder(model)
    with pytest.raises(ValueError, match="causal attention, got attention in both directions"):
        LoopedDecoderForCausalLM.from_decoder(decoder("gemma3", use_bidirectional_attention=True))


SMALL = {
    "vocab_size": 20, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
UNLIKE = {
    "Bloom": ({}, "layers that need nothing but h and .*, got BloomBlock, which needs 'alibi'"),
    "Gemma3n": (
        {"name": "Gemma3nText", "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
         "vocab_size_per_layer_input": 20, "laurel_rank": 4, "activation_sparsity_pattern": None},
        "got Gemma3nForCausalLM: its parts put together again fail with",
    ),
    "LongcatFlash": (
        {"num_layers": 3, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 2,
         "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48, "moe_topk": 2, "head_dim": 4,
         "num_key_value_heads": 4},
        r"decoder of num_hidden_layers=\d layers, got LongcatFlashForCausalLM with \d",
    ),
    "OPT": ({"ffn_dim": 48, "word_embed_proj_dim": WIDTH}, "ModuleList layers or h, got OPTModel"),
    "XGLM": ({"d_model": WIDTH, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48},
             "closing norm norm or .* or ln_f, got XGLMModel without one"),
    "Qwen3Next": (
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "num_experts": 2, "num_experts_per_tok": 1, "linear_num_key_heads": 2,
         "linear_num_value_heads": 2,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
        "full_attention or sliding_attention, got linear_attention",
    ),
    "NanoChat": ({}, "got NanoChatForCausalLM: its parts .* give other logits"),
}  # fmt: skip
"""Decoders whose forward is unlike the rest: what their configuration takes besides SMALL, and what
the error says."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNLIKE)
def test_a_decoder_unlike_the_rest_is_refused_in_one_sentence(kind):
    options, message = dict(UNLIKE[kind][0]), UNLIKE[kind][1]
    name = options.pop("name", kind)
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"this transformers has no {kind}")
    config = getattr(transformers, f"{name}Config")(**SMALL | options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with pytest.raises((TypeError, ValueError), match=message) as error:
        LoopedDecoderForCausalLM.from_decoder(model)
    assert str(error.value).startswith("model: expected ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 4}, r"make up the 4 layers .* got 1 \+ 4 \+ 1"),
        ({"block": 1}, r"make up the 4 layers .* got 1 \+ 1 \+ 1"),
        ({"prelude": 3}, "block: expected an integer >= 1, got 0"),
        ({"prelude": -1}, "prelude: expected an integer >= 0, got -1"),
        ({"prelude": None}, "prelude: expected an integer >= 0, got None"),
        ({"coda": "1"}, "coda: expected an integer >= 0, got '1'"),
        ({"layers": [0, 1, 9]}, r"different layers among 0 to 3, got \[0, 1, 9\]"),
        ({"layers": [0, 1, 1]}, r"different layers among 0 to 3, got \[0, 1, 1\]"),
        ({"injection": "concat"}, "injection: expected one of none, add, adapter, got 'concat'"),
        ({"state": "zeros"}, "state: expected one of prelude, noise, learned, got 'zeros'"),
        ({"state": "noise"}, "injection: expected add or adapter with state 'noise'"),
        ({"state_std": -1.0}, "state_std: expected a number"),
        (
            {"injection": "adapter", "adapter_start": "zero"},
            "adapter_start: expected one of state, inputs or none, got 'zero'",
        ),
        (
            {"injection": "add", "adapter_start": "state"},
            "adapter_start: expected none with injection add, which has no adapter, got state",
        ),
        ({"turns": 0}, "total_ut_steps: expected an integer >= 1, got 0"),
    ],
)
def test_settings_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LoopedDecoderForCausalLM.from_decoder(decoder("llama"), **options)


@pytest.mark.parametrize("layers", [3, "0123", torch.nn.ModuleList()])
def test_layers_that_are_no_list_are_named(layers):
    with pytest.raises(TypeError, match="layers: expected a list of integers or None, got "):
        LoopedDecoderForCausalLM.from_decoder(decoder("llama"), layers=layers)


def test_arguments_out_of_range_are_named():
    model, ids = looped("llama"), tokens(2, 5)
    cache = model(ids, turns=2, use_cache=True)
    cache = cache.get("cache", cache.get("past_key_values"))
    for error, message, given in (
        (ValueError, "turns: expected an integer >= 1", {"turns": 0}),
        (TypeError, r"looped decoder: unknown arguments \['turn'\]", {"turn": 2}),
        (ValueError, "at 2 turns and can't go on with 3", {"turns": 3, "cache": cache}),
        (TypeError, "expected a LoopedDecoderCache", {"cache": transformers.DynamicCache()}),
        (ValueError, "expected a cache for 2 layers, got 1", {"cache": LoopedDecoderCache(1, 2)}),
        (ValueError, "labels: expected shape", {"labels": ids[:, 1:]}),
    ):
        with pytest.raises(error, match=message):
            model(ids, **given)
    with pytest.raises(ValueError, match="input_ids: expected either"):
        model()
    with pytest.raises(ValueError, match="cache_implementation: expected None or 'dynamic'"):
        model.generate(ids, cache_implementation="static")
    with pytest.raises(ValueError, match=r"(?i)flash.?attention"):
        model.set_attn_implementation("flash_attention_2")
