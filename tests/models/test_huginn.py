"""Huginn and retrofitted decoders, against an independent reading of their formulas, and in the
ways of calling them."""

import decoder_models
import huginn_reference
import pytest
import torch
from huginn_models import checkpoint, files, model, tokens
from oracle import KeepDouble, relative_error
from scipy import stats

from stars_fast.models.huginn import HuginnCache, HuginnConfig, HuginnForCausalLM
from stars_fast.models.huginn.retrofit import retrofit
from stars_fast.models.huginn.state import noise_state
from stars_fast.models.huginn.tiny import SHAPES

each_shape = pytest.mark.parametrize("shape", SHAPES)


# -- the formulas


@pytest.mark.parametrize("turns", [1, 4, 8])
@each_shape
def test_logits_are_those_of_the_formulas(shape, turns):
    net, ids = model(shape), tokens(2, 9)
    with torch.no_grad():
        out = net(ids, turns=turns, output_hidden_states=True)
    weights, config = files(checkpoint(shape))
    start = out.hidden_states[0]
    expected = huginn_reference.logits(weights, config, shape, ids, start, turns)
    assert relative_error(out.logits, expected) <= 1e-10
    assert len(out.hidden_states) == turns + 1
    assert out.turns.tolist() == [[turns] * 9] * 2


def test_an_adapter_with_a_bias_and_other_numbers_of_layers():
    fields = {"n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 3, "n_layers_in_coda": 0}
    net, ids = model(bias=True, **fields), tokens(1, 6)
    bias = net.part("adapter").bias
    assert bias.abs().min() > 0
    with torch.no_grad():
        out = net(ids, turns=2, output_hidden_states=True)
        bias.zero_()
        unbiased = net(ids, turns=2).logits
    weights, config = files(checkpoint(bias=True, **fields))
    expected = huginn_reference.logits(weights, config, "huginn", ids, out.hidden_states[0], 2)
    assert relative_error(unbiased, expected) <= 1e-10
    assert relative_error(out.logits, expected) > 1e-2


def decoder(kind, layers=6):
    from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

    config, whole = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    }[kind]
    torch.manual_seed(3)
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
        "initializer_range": 0.2, "rope_theta": 10_000.0,
    }  # fmt: skip
    net = whole(config(**sizes)).double().eval()
    # In fp64, where transformers has fp32 whatever the dtype; theirs are compared in the tests of
    # Ouro, whose rotary positions these are.
    fields = {"head_dim": 8, "rope_theta": 10_000.0}

    def tables(x, position_ids):
        angles = huginn_reference.angles(x.shape[1], fields, kind).repeat(1, 2)[None]
        return angles.cos(), angles.sin()

    net.model.rotary_emb.forward = tables
    return net


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_a_turn_of_a_retrofitted_decoder_is_the_decoder(kind, tmp_path):
    """Every layer in its place, and the adapter as it begins: one turn is transformers' model."""
    base, ids = decoder(kind), tokens(2, 9)
    net = retrofit(base, [0, 1], [2, 3, 4], [5], turns=1)
    with torch.no_grad():
        with KeepDouble():
            expected = base(ids).logits
        assert relative_error(net(ids).logits, expected) <= 1e-12
        # As it begins, the adapter does not look at the state.
        assert relative_error(net(ids, turns=3).logits, expected) <= 1e-12
        net.save_pretrained(tmp_path / "net")
        again = HuginnForCausalLM.from_pretrained(tmp_path / "net")
        assert again.dtype == torch.float64
        assert relative_error(again(ids).logits, expected) <= 1e-12


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_layers_of_a_retrofitted_decoder_may_be_left_out(kind):
    base, ids = decoder(kind), tokens(1, 7)
    net = retrofit(base, [0], [4], [5], turns=1)
    base.model.layers = torch.nn.ModuleList(base.model.layers[i] for i in (0, 4, 5))
    for i, layer in enumerate(base.model.layers):
        layer.self_attn.layer_idx = i
    with torch.no_grad():
        with KeepDouble():
            expected = base(ids, use_cache=False).logits
        assert relative_error(net(ids).logits, expected) <= 1e-12


def test_what_can_not_be_retrofitted_is_said():
    base = decoder("llama", layers=2)
    with pytest.raises(ValueError, match="core: expected layers of the decoder's 2, got 2"):
        retrofit(base, [0], [2], [1])
    base.config.mlp_bias = True
    with pytest.raises(ValueError, match="decoder: expected mlp_bias=False, got True"):
        retrofit(base, [0], [1], [1])
    for other in ("x", None, base.model, decoder_models.decoder("gpt2")):
        kind = type(other).__name__
        with pytest.raises(TypeError, match=f"decoder: expected a LlamaForCausalLM .*got {kind}$"):
            retrofit(other, [0], [1], [1])
    base.config.mlp_bias = False
    for layers in (1, "0", [0.0]):
        with pytest.raises(TypeError, match="core: expected a list of integers, got "):
            retrofit(base, [0], layers, [1])


# -- the initial state


def test_the_initial_state_is_that_of_the_public_law():
    """A normal cut off at three standard deviations; two seeds and two places have nothing in
    common."""
    z = noise_state(5, torch.arange(200)[None], 500, 1.0)[0]
    law = stats.truncnorm(-3, 3)
    assert stats.kstest(z.flatten().numpy(), law.cdf).pvalue > 1e-3
    assert z.abs().max() <= 3
    other = noise_state(6, torch.arange(200)[None], 500, 1.0)[0]
    for a, b in ((z, other), (z[1:], z[:-1]), (z[:, 1:], z[:, :-1])):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.015


@each_shape
def test_its_scale_is_that_of_the_configuration(shape):
    net = model(shape)
    scales = net.config.init_values
    with torch.no_grad():
        start = net(tokens(1, 256), output_hidden_states=True, turns=1).hidden_states[0]
    std = scales["std"] * scales["embed_scale"]
    assert start.std() == pytest.approx(std * stats.truncnorm(-3, 3).std(), rel=0.03)


@torch.no_grad()
def test_a_token_has_one_initial_state_whatever_stands_beside_it():
    net, ids = model(), tokens(2, 7)

    def start(ids, **options):
        return net(ids, turns=1, output_hidden_states=True, **options).hidden_states[0]

    whole = start(ids)
    assert torch.equal(start(ids), whole)
    assert torch.equal(start(ids[:1, :4]), whole[:1, :4])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    assert torch.equal(start(ids, attention_mask=mask)[0, 2:], whole[0, :5])
    bounds = torch.tensor([0, 3, 7])
    packed = start(ids[:1], cu_seqlens=bounds)[0]
    assert torch.equal(packed[3:], whole[0, :4])
    other = HuginnForCausalLM.from_pretrained(checkpoint(), dtype=torch.float64, state_seed=1)
    different = other(ids, turns=1, output_hidden_states=True).hidden_states[0]
    assert not torch.isclose(different, whole).any()


def test_in_training_the_initial_states_are_drawn_as_dropout_is():
    net, ids = model().train(), tokens(2, 5)

    def start(seed):
        torch.manual_seed(seed)
        return net(ids, turns=1, output_hidden_states=True).hidden_states[0]

    assert torch.equal(start(1), start(1))
    assert not torch.isclose(start(1), start(2)).any()
    rows = start(1)
    assert not torch.isclose(rows[0], rows[1]).any()
    bounds = {"cu_seqlens": torch.tensor([0, 3, 6])}
    row = net(tokens(1, 6), turns=1, output_hidden_states=True, **bounds).hidden_states[0][0]
    assert not torch.isclose(row[:3], row[3:]).any()


@torch.no_grad()
def test_a_state_can_be_given_and_can_be_the_input():
    net, ids = model(), tokens(1, 5)
    given = torch.randn(1, 5, 32, dtype=torch.float64)
    out = net(ids, turns=3, input_states=given, output_hidden_states=True)
    assert torch.equal(out.hidden_states[0], given)
    weights, config = files(checkpoint())
    expected = huginn_reference.logits(weights, config, "huginn", ids, given, 3)
    assert relative_error(out.logits, expected) <= 1e-10
    itself = model(initial_state_mode="embed-init")
    out = itself(ids, turns=1, output_hidden_states=True)
    assert torch.equal(out.hidden_states[0], out.inputs)
    with pytest.raises(ValueError, match=r"input_states: expected \[1, 5, 32\], got \[1, 4, 32\]"):
        net(ids, input_states=given[:, :4])


# -- pads, documents, caches


@torch.no_grad()
@each_shape
def test_pads_and_documents_change_nothing(shape):
    net, ids = model(shape), tokens(1, 8)
    alone = net(ids[:, 3:], turns=3).logits
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    assert relative_error(net(ids, attention_mask=mask, turns=3).logits[:, 3:], alone) <= 1e-12
    bounds = torch.tensor([0, 3, 8])
    assert relative_error(net(ids, cu_seqlens=bounds, turns=3).logits[:, 3:], alone) <= 1e-12
    with pytest.raises(ValueError, match="use_cache: expected False for packed documents"):
        net(ids, cu_seqlens=bounds, use_cache=True)


@torch.no_grad()
@each_shape
def test_with_a_cache_logits_are_the_same(shape):
    net, ids = model(shape), tokens(2, 9)
    whole = net(ids, turns=3, use_cache=False).logits
    cache, parts = None, []
    for part in ids.split([4, 1, 1, 3], 1):
        out = net(part, turns=3, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert relative_error(torch.cat(parts, 1), whole) <= 1e-12
    assert len(cache.layers) == 1 + 3 * 2 + 1
    with pytest.raises(ValueError, match="turns: this cache holds 9 tokens at 3 turns"):
        net(ids[:, :1], turns=4, past_key_values=cache)
    with pytest.raises(TypeError, match=r"past_key_values: expected a HuginnCache, .*got str"):
        net(ids, past_key_values="cache")


@each_shape
def test_generation_is_what_the_turns_say(shape):
    net, prompt = model(shape), tokens(2, 5)
    for turns in (1, 3):
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = net.generate(prompt, turns=turns, max_new_tokens=6, **options)
        with torch.no_grad():
            greedy = net(found, turns=turns, use_cache=False).logits.argmax(-1)
        assert torch.equal(found[:, 5:], greedy[:, 4:-1])
        slow = net.generate(prompt, turns=turns, max_new_tokens=6, use_cache=False, **options)
        assert torch.equal(slow, found)
    beams = net.generate(prompt, num_beams=2, turns=2, max_new_tokens=3, **options)
    assert beams.shape == (2, 8)


@torch.no_grad()
@pytest.mark.parametrize("per", ["sequence", "token"])
def test_what_rests_takes_no_further_turn(per):
    net, ids = model(), tokens(3, 6)
    net.part("adapter").weight[:, :32] *= 0.02  # a turn that draws states together
    out = net(ids, turns=40, tol=1e-2, tol_per=per, output_hidden_states=True)
    taken = out.turns
    assert 1 < taken.min() < 40
    states = net(ids, turns=40, output_hidden_states=True).hidden_states
    if per == "sequence":
        for row, turns in enumerate(taken[:, 0].tolist()):
            assert relative_error(out.hidden_states[-1][row], states[turns][row]) <= 1e-12
            alone = net(ids[row : row + 1], turns=turns).logits
            assert relative_error(out.logits[row : row + 1], alone) <= 1e-12
    cache = out.past_key_values
    more = net(ids[:, :1], turns=40, tol=1e-2, tol_per=per, past_key_values=cache)
    assert cache.get_seq_length() == 7
    assert more.logits.isfinite().all()


# -- turns


@torch.no_grad()
def test_the_ways_to_say_how_many_turns():
    net, ids = model(), tokens(1, 5)
    expected = net(ids, turns=3).logits
    for number in (3, torch.tensor(3), (3, 0), torch.tensor([1, 2])):
        assert torch.equal(net(ids, num_steps=number).logits, expected)
    for name in ("turns", "num_steps", "mean_recurrence"):
        other = HuginnForCausalLM.from_pretrained(checkpoint(), dtype=torch.float64, **{name: 3})
        assert torch.equal(other(ids).logits, expected)
    assert not torch.equal(net(ids).logits, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"turns": 0}, ValueError, r"turns: .*0"),
        ({"turns": 2, "num_steps": 2}, ValueError, "num_steps: expected None when turns is given"),
        ({"num_steps": (1, 2, 3)}, ValueError, "num_steps: expected a number, or two"),
        ({"num_steps": (0, 0)}, ValueError, r"num_steps: .*0"),
        ({"backprop_turns": 0}, ValueError, r"backprop_turns: .*0"),
        ({"tol": -1.0}, ValueError, r"tol: .*-1"),
        (
            {"turns": 4, "backprop_turns": 2, "tol": 0.5},
            ValueError,
            "expected all 4 turns",
        ),
        ({"words": 1}, TypeError, r"Huginn: unknown arguments \['words'\]"),
        ({"output_attentions": True}, ValueError, "output_attentions: expected False"),
    ],
)
def test_mistakes_of_a_call_are_named(options, error, message):
    with pytest.raises(error, match=message):
        model()(tokens(1, 3), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "input_ids: expected either"),
        ({"input_ids": torch.zeros(1, 3)}, "input_ids: expected integers"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "input_ids: expected a token"),
        ({"inputs_embeds": torch.zeros(1, 3, 8)}, r"inputs_embeds: expected \[B, S, 32\]"),
    ],
)
def test_mistakes_of_the_tokens_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        model()(**arguments)


@torch.no_grad()
def test_embeddings_can_be_given_instead_of_tokens():
    net, ids = model(), tokens(1, 5)
    embedded = net.get_input_embeddings()(ids)
    assert torch.equal(net(inputs_embeds=embedded).logits, net(ids).logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 0}, r"n_embd: .*0"),
        (
            {"n_heads": 4, "n_embd": 32, "num_key_value_heads": 3},
            "num_key_value_heads: expected a divisor",
        ),
        ({"n_heads": 4, "n_embd": 36}, "head_dim: expected an even .*9"),
        ({"padded_vocab_size": 100}, "padded_vocab_size: expected at least vocab_size=65536"),
        ({"nonlin_name": "ReLU"}, "nonlin_name: expected 'SiLU', got 'ReLU'"),
        ({"injection_type": "add"}, "injection_type: expected 'linear', got 'add'"),
        ({"block_class_name": "TransformerBlock"}, "block_class_name: expected 'SandwichBlock'"),
        ({"test_time_noise": 0.1}, "test_time_noise: expected 0 .*0.1"),
        ({"layer_layout": "gpt2"}, "layer_layout: expected one of .*'gpt2'"),
        ({"initial_state_mode": "skip-adapter"}, "initial_state_mode: expected one of .*skip-ad"),
        ({"num_key_value_heads": 11}, "qk_bias: expected False with num_key_value_heads=11"),
        ({"mean_recurrence": 0}, r"mean_recurrence: .*0"),
        ({"n_layers_in_recurrent_block": 0}, r"n_layers_in_recurrent_block: .*0"),
        ({"n_layers_in_prelude": -1}, r"n_layers_in_prelude: .*-1"),
        ({"state_seed": -1}, r"state_seed: .*-1"),
        ({"init_values": {"std": 1.0}}, "init_values: expected out_proj"),
        ({"norm_eps": -1.0}, r"norm_eps: .*-1"),
        ({"convergence_tol": -0.5}, r"convergence_tol: .*-0.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, None),
    ],
)
def test_mistakes_of_a_configuration_are_named(fields, message):
    if message is None:  # told where the frequencies are made
        config = HuginnConfig(
            n_embd=32, n_heads=4, vocab_size=300, layer_layout="llama", qk_bias=False, **fields
        )
        with pytest.raises(ValueError, match=r"rope_scaling: expected rope_type .*'dynamic'"):
            HuginnForCausalLM(config)
        return
    with pytest.raises((ValueError, TypeError), match=message):
        HuginnConfig(**fields)


def test_the_defaults_are_those_of_huginn_0125():
    config = HuginnConfig()
    assert (config.head_dim, config.n_layers, config.effective_expected_depth) == (96, 8, 132)
    assert config.init_values == pytest.approx(
        {"std": 0.008703882797784892, "out_proj": 0.0005356869554443541,
         "embedding": 0.008703882797784892, "embed_scale": 72.6636084983398}
    )  # fmt: skip
    with torch.device("meta"):
        net = HuginnForCausalLM(config)
    # 8 layers of Wqkv, proj, fc, proj, 4 norms and qk_bias; adapter, embedding, the last norm.
    layer = 4 * 5280**2 + 3 * 5280 * 17920 + 4 * 5280 + 2 * 5280
    expected = 8 * layer + 2 * 5280**2 + 65536 * 5280 + 5280
    assert sum(p.numel() for p in net.parameters()) == expected


def test_initial_weights_are_the_published_ones():
    config = HuginnConfig(n_embd=64, n_heads=4, intermediate_size=96, vocab_size=500)
    net, scales = HuginnForCausalLM(config), config.init_values
    layer, shrink = net.part("core_block")[0], stats.truncnorm(-3, 3).std()
    drawn = {
        "std": [layer.attn.Wqkv.weight, layer.mlp.fc.weight[:96], net.part("adapter").weight],
        "out_proj": [layer.attn.proj.weight, layer.mlp.proj.weight, layer.mlp.fc.weight[96:]],
        "embedding": [net.part("wte").weight],
    }
    for name, weights in drawn.items():
        for weight in (each.detach() for each in weights):
            assert weight.std() == pytest.approx(scales[name] * shrink, rel=0.05)
            assert weight.abs().max() <= 3 * scales[name]
    assert layer.attn.qk_bias.abs().max() == 0
    assert layer.norm_4.weight.min() == 1
    assert net.lm_head.weight is net.part("wte").weight


def test_the_cache_has_a_slot_for_each_layer_of_each_turn():
    cache = HuginnCache(2, 4, turns=3)
    found = [cache.slot(0, i) for i in (-2, -1)]
    found += [cache.slot(turn, i) for turn in range(3) for i in range(4)]
    found += [cache.slot(0, 4), cache.slot(0, 5)]
    assert found == list(range(16))
