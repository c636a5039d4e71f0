"""One turn of models of several makes: its value, its Jacobian loss and the gradients in fp64.

To 1e-9: masks and layouts differ, and with them the order of sums.
"""

import re

import pytest
import torch
from oracle import KeepDouble, WrittenOutNorm, relative_error
from stand_ins import NanbeigeForCausalLM, OuroForCausalLM, RavenForCausalLM
from tolerances import BLOCK
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from stars_fast import explain, fused_jsrr, fused_jvp
from stars_fast.models.loop_keys import norm_closes_turn, refuse_unread_loop
from stars_fast.models.looped import LoopedConfig, LoopedLM
from stars_fast.models.looped_block import looped_block
from stars_fast.tokens import check_tokens, describe_tokens

B, S, D = 2, 6, 16


def state(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask(*rows):
    return torch.tensor([[int(c) for c in row] for row in rows])


def documents(*lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


@pytest.fixture(autouse=True)
def _keep_double():
    with KeepDouble():
        yield


def perturb(model):
    """fp64, off symmetric values."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


def transformers_model(name, attention="sdpa", **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 11,
        "hidden_size": D,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 32,
        "attn_implementation": attention,
    }
    if name == "gpt2":
        sizes = {"vocab_size": 11, "n_embd": D, "n_layer": 3, "n_head": 4}
    elif name == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        sizes |= {"sliding_window": 3, "layer_types": kinds, "query_pre_attn_scalar": 4}
        return perturb(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)))
    make = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }[name]
    if name == "mistral":
        sizes["sliding_window"] = 3
    return perturb(make[1](make[0](**sizes | options)))


def llama_with(**changes):
    model = transformers_model("llama")
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def ouro(**options):
    torch.manual_seed(0)
    return perturb(OuroForCausalLM(**options))


def nanbeige(**options):
    torch.manual_seed(0)
    return perturb(NanbeigeForCausalLM(**options))


def huginn(**options):
    torch.manual_seed(0)
    return perturb(RavenForCausalLM(**options))


def own_ouro():
    """Our Ouro, with the weights of the stand-in: `ouro()` is its reference."""
    pytest.importorskip("transformers")
    from stars_fast.models import ouro as own

    config = own.OuroConfig(
        vocab_size=11,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=3,
        rope_theta=100.0,
    )
    model = own.OuroForCausalLM(config).double().eval()
    model.load_state_dict(ouro().state_dict())
    return model


MODELS = {
    "own-ouro": own_ouro,
    "ouro-sdpa": ouro,
    "ouro-eager": lambda: ouro(attention="eager"),
    "nanbeige": nanbeige,
    "huginn": huginn,
    "huginn-tuple-complex": lambda: huginn(as_tuple=True, complex_tables=True),
    "llama": lambda: transformers_model("llama"),
    "llama-eager": lambda: transformers_model("llama", "eager"),
    "qwen3": lambda: transformers_model("qwen3"),
    "mistral": lambda: transformers_model("mistral"),
    "gemma3": lambda: transformers_model("gemma3"),
    "gpt2": lambda: transformers_model("gpt2"),
}
HUGINN = [name for name in MODELS if name.startswith("huginn")]
MASKED = [name for name in MODELS if name not in HUGINN]


def block_of(name, h, **options):
    if name in HUGINN:
        options["inputs"] = state(*h.shape, seed=8)
    return looped_block(MODELS[name](), **options)


def loss_and_gradients(block, h, v, **options):
    loss = fused_jsrr(block, h, v=v, **options)
    return loss, torch.autograd.grad(loss, list(block.parameters()), allow_unused=True)


def same_gradients(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert relative_error(mine, theirs) <= BLOCK


# -- values


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pads", [None, ("111111", "111100"), ("001111", "111111")])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
def test_all_layers_of_a_transformers_model(name, pads, attention):
    model = transformers_model(name, attention)
    real = mask("111111", "111111") if pads is None else mask(*pads)
    tokens = torch.arange(B * S).view(B, S) % 11
    positions = (real.cumsum(1) - 1).clamp_min(0)
    out = model(
        tokens,
        attention_mask=None if pads is None else real,
        position_ids=positions,
        output_hidden_states=True,
        use_cache=False,
    )
    given = None if pads is None else real
    first, last = out.hidden_states[0], out.hidden_states[-1]
    seen = real.bool()
    whole = looped_block(model, attention_mask=given, norm=True)
    torch.testing.assert_close(whole(first)[seen], last[seen], rtol=1e-9, atol=1e-9)
    cut = looped_block(model, attention_mask=given, layers=slice(2))
    torch.testing.assert_close(cut(first)[seen], out.hidden_states[2][seen], rtol=1e-9, atol=1e-9)
    rest = looped_block(model.base_model, attention_mask=given, layers=slice(2, None), norm=True)
    torch.testing.assert_close(rest(cut(first))[seen], last[seen], rtol=1e-9, atol=1e-9)
    assert looped_block(model)(first).isfinite().all()


def dense_masks(attention, window=3):
    distance = torch.arange(S)[:, None] - torch.arange(S)
    kinds = {
        "full_attention": distance >= 0,
        "sliding_attention": (distance >= 0) & (distance < window),
    }
    if attention == "eager":
        return {kind: torch.zeros(S, S).masked_fill(~sees, -1e30) for kind, sees in kinds.items()}
    return kinds


@pytest.mark.parametrize("as_tuple", [False, True], ids=["tensor", "tuple"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_turn_of_ouro_by_remote_code(attention, as_tuple):
    model, h = ouro(attention=attention, as_tuple=as_tuple), state(B, S, D)
    expected = model.model(inputs_embeds=h, attention_mask=dense_masks(attention))
    torch.testing.assert_close(looped_block(model)(h), expected, rtol=1e-9, atol=1e-9)
    unclosed = looped_block(model, norm=False)
    torch.testing.assert_close(model.model.norm(unclosed(h)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", HUGINN)
def test_a_turn_of_huginn(name):
    model, h, inputs = MODELS[name](), state(B, S, D), state(B, S, D, seed=8)
    tables = model.freqs_cis[:, :S]
    expected, _ = model.core_block_forward(h, inputs, tables, None, None, 0)
    assert torch.equal(looped_block(model, inputs=inputs)(h), expected)
    assert torch.equal(looped_block(model)(h, inputs=inputs), expected)


def test_a_turn_of_our_own_ouro():
    model, h, real = own_ouro(), state(B, S, D), mask("111111", "111100")
    block = looped_block(model, attention_mask=real)
    expected = model.model.turn(h, model.model.prepare(h, attention_mask=real))
    assert torch.equal(block(h), expected)
    assert torch.equal(looped_block(model.model, attention_mask=real)(h), expected)
    theirs = looped_block(ouro(), attention_mask=real)(h)
    torch.testing.assert_close(expected[real.bool()], theirs[real.bool()], rtol=1e-9, atol=1e-9)
    assert set(dict(block.named_parameters())) == set(dict(looped_block(ouro()).named_parameters()))


# -- loops that a configuration tells of


@pytest.mark.parametrize("loops", [2, 3])
@pytest.mark.parametrize("skips", [False, True])
def test_turns_of_nanbeige_are_its_own_loop(skips, loops):
    model = nanbeige(num_loops=loops, skip_loop_final_norm=skips)
    tokens = torch.arange(B * S).view(B, S) % 11
    block, h = looped_block(model), model.model.embed_tokens(tokens)
    assert (block.norm is None) == skips
    for _ in range(loops):
        h = block(h)
    h = model.model.norm(h) if skips else h
    torch.testing.assert_close(h, model.model(tokens), rtol=1e-12, atol=1e-12)
    other = looped_block(model, norm=skips)
    assert not torch.allclose(other(h), block(h))


def test_the_jacobian_of_nanbeige_is_that_of_its_loop():
    """J v of two turns by the chain rule, against the model's own loop from the embeddings."""
    model = nanbeige()
    tokens = torch.arange(B * S).view(B, S) % 11
    v, h = state(B, S, D, seed=5), model.model.embed_tokens(tokens)

    def loop(x):
        model.model.embed_tokens.forward = lambda _: x
        return model.model(tokens)

    with sdpa_kernel(SDPBackend.MATH):
        _, expected = torch.func.jvp(loop, (h,), (v,))
    block = looped_block(model)
    middle, through = fused_jvp(block, h, v)
    _, got = fused_jvp(block, middle, through)
    assert relative_error(got, expected) <= BLOCK


def test_a_stack_that_runs_once_leaves_its_norm_to_the_head():
    for model in (nanbeige(num_loops=1), llama_with(num_loops=1, total_ut_steps=None)):
        assert looped_block(model).norm is None
    # Nanbeige counts its loops by these weights where it has some.
    assert looped_block(nanbeige(num_loops=1, loop_loss_weights=[0.3])).norm is not None


UNKNOWN = {
    "num_loops": 2,
    "total_ut_steps": 4,
    "num_recurrence": 8,
    "num_recurrent_layers": 4,
    "mean_recurrence": 32,
    "n_recurrent_loops": 2,
    "loop_num_passes": 3,
    "loop_map": {"0": 2},
    "recurse_layers": 4,
    "use_loop_encoding": True,
    "n_repeats": 3,
    "num_iterations": 3,
    "universal_steps": 4,
    "numLoops": 2,
    "number_of_turns": 2,
    "total_passes": 3,
    "L_cycles": 3,
    "pondering_steps": 2,
    "recursion_depths": [1, 2, 1],
    "loop_count": 2,
    "n_loop": 2,
    "recurrent_depth": 2,
    "layer_repeats": 2,
    "num_layer_reuse": 3,
    "core_repeat": 2,
    "n_iter": 3,
    "unroll_steps": 4,
}


@pytest.mark.parametrize("key", UNKNOWN)
def test_a_loop_that_is_not_known_is_named(key):
    model = llama_with(**{key: UNKNOWN[key]})
    message = re.escape(f"got {key}={UNKNOWN[key]!r}; say what one turn is by layers=slice(...)")
    for options in ({}, {"norm": True}, {"layers": slice(1, 3)}):
        with pytest.raises(ValueError, match=message):
            looped_block(model, **options)
    said = looped_block(model, norm=False, layers=slice(1, 3))
    h = state(B, S, D)
    assert torch.equal(said(h), looped_block(llama_with(), layers=slice(1, 3))(h))


NO_LOOP = {
    "loopback_url": "http://localhost",
    "no_repeat_ngram_size": 3,
    "time_step_max": 0.1,
    "sinkhorn_iterations": 20,
    "repetition_penalty": 1.2,
    "max_steps": 1000,
    "max_iters": 1000,
    "num_block_repeats": [1, 2],
    "repeats": 2,
    "layer_count": 3,
    "outputs": 4,
    "tropes": "loops",
    "num_loops": 1,
    "n_repeats": None,
    "loop_counts": [1, 1, 1],
    "is_looped": False,
}


@pytest.mark.parametrize("key", NO_LOOP)
def test_a_key_that_tells_of_no_loop_is_let_through(key):
    assert looped_block(llama_with(**{key: NO_LOOP[key]})).norm is None


LOOPING = {"dory", "esmfold2", "hrm_text", "inkling2_loop", "inkling2_loop_text"}
"""Model types of transformers that run some of their layers more than once."""


@pytest.mark.slow
def test_no_configuration_of_transformers_is_taken_for_a_loop():
    """Each with its defaults: only those that do loop are refused, whatever else their keys say."""
    transformers = pytest.importorskip("transformers")
    seen, refused = 0, set()
    for kind in dict.fromkeys(transformers.CONFIG_MAPPING):
        try:
            config = transformers.CONFIG_MAPPING[kind]()
        except Exception:  # it has no defaults, or wants another library
            continue
        if not type(config).__module__.startswith("transformers."):  # another test registered it
            continue
        seen += 1
        refuse_unread_loop(config.to_dict(), type(config))  # a class reads its own keys
        try:
            assert norm_closes_turn(config) == (kind == "ouro")
        except ValueError:
            refused.add(kind)
    assert seen > 300
    assert refused <= LOOPING


@pytest.mark.parametrize(
    "odd",
    [
        {"enable_double_loop_split": True, "loop_middle_layers": 3},
        {"loop_share_kv": True},
        {"enable_hyper_connection": True},
        {"enable_depth_attention": True},
        {"insert_ngram_layer_idx": [1]},
        {"ngram_insert_all_layers": True},
    ],
)
def test_what_makes_a_turn_of_nanbeige_more_than_its_layers_is_named(odd):
    message = ".*".join(re.escape(f"{name}={value!r}") for name, value in odd.items())
    with pytest.raises(ValueError, match=f"got {message}; say what one turn is"):
        looped_block(nanbeige(**odd))


def test_a_loop_of_transformers_own_that_is_not_known_is_named():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DoryForCausalLM"):
        pytest.skip("this transformers has no Dory")
    sizes = {"vocab_size": 11, "hidden_size": D, "intermediate_size": 24, "head_dim": 4}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.DoryConfig(**sizes, n_input_layers=1, n_output_layers=1)
    with pytest.raises(ValueError, match=r"got .*n_recurrent_loops=2.*; say what one turn is"):
        looped_block(transformers.DoryForCausalLM(config))


@pytest.mark.parametrize("windowed", [False, True])
def test_a_window_counts_where_it_is_used(windowed):
    h, options = state(B, S, D), {"use_sliding_window": windowed, "sliding_window": 3}
    if windowed:
        options["max_window_layers"] = 1
    # Mistral's configuration has no layer_types.
    mistral = transformers_model("mistral", sliding_window=3 if windowed else None)
    for model in (transformers_model("qwen2", **options), mistral):
        out = model(inputs_embeds=h, output_hidden_states=True, use_cache=False)
        got = looped_block(model, norm=True)(h)
        torch.testing.assert_close(got, out.hidden_states[-1], rtol=1e-9, atol=1e-9)
    # Llama's code reads no window, whatever its configuration has kept.
    assert torch.equal(looped_block(llama_with(**options))(h), looped_block(llama_with())(h))


@pytest.mark.parametrize("name", MASKED)
def test_positions_that_restart_are_packed_documents(name):
    block, h = looped_block(MODELS[name]()), state(2, 7, D)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0]])
    packed = zip(h.unsqueeze(1), (documents(3, 4), documents(1, 5, 1)), strict=True)
    rows = [block(row, cu_seqlens=cu) for row, cu in packed]
    torch.testing.assert_close(block(h, position_ids=positions), torch.cat(rows))
    one = block(h, position_ids=positions[0])
    torch.testing.assert_close(one[:1], rows[0])
    for rising in (torch.arange(7), torch.tensor([0, 1, 2, 5, 6, 7, 9])):
        causal = block(h, position_ids=rising)[:, :3]
        torch.testing.assert_close(causal, block(h)[:, :3])
    last = block(h, position_ids=rising)[:, -1]
    changed = block(h.index_fill(1, torch.tensor([4]), 1.0), position_ids=rising)[:, -1]
    assert not torch.allclose(last, changed)


def test_positions_are_read_as_transformers_reads_them():
    model, h, real = transformers_model("llama"), state(B, S, D), mask("111111", "011110")
    for given, positions in (
        (None, torch.tensor([0, 1, 2, 0, 1, 2]).expand(B, S)),
        (real, torch.tensor([[3, 4, 5, 6, 7, 8], [1, 0, 1, 4, 5, 1]])),
    ):
        out = model(
            inputs_embeds=h,
            attention_mask=given,
            position_ids=positions,
            output_hidden_states=True,
            use_cache=False,
        )
        block = looped_block(model, attention_mask=given, position_ids=positions, norm=True)
        got, seen = block(h), real.bool()
        expected = out.hidden_states[-1]
        torch.testing.assert_close(got[seen], expected[seen], rtol=1e-9, atol=1e-9)


def test_positions_that_the_host_does_not_look_at(monkeypatch):
    block, h = looped_block(transformers_model("llama")), state(B, S, D)
    inputs = {"inputs": state(B, S, D, seed=8)}
    core, shifted = looped_block(huginn()), torch.arange(S) + 1
    restart = torch.tensor([0, 1, 2, 0, 1, 2])
    assert describe_tokens(h, position_ids=shifted).is_causal()
    expected = [block(h), block(h, position_ids=restart), core(h, position_ids=shifted, **inputs)]
    monkeypatch.setattr("stars_fast.tokens._host_knows", lambda tensor: False)
    got = [
        block(h, position_ids=torch.arange(S)),
        block(h, position_ids=restart),
        core(h, position_ids=shifted, **inputs),
    ]
    torch.testing.assert_close(got, expected)
    with pytest.raises(RuntimeError, match="position_ids: Huginn takes no attention mask"):
        core(h, position_ids=restart, **inputs)
    elsewhere = torch.empty(B, S, D, device="meta")
    assert not describe_tokens(elsewhere, position_ids=torch.arange(S, device="meta")).is_causal()


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("rows", [("000000", "111111"), ("001111", "110011")])
def test_a_pad_sees_itself_alone_so_that_no_softmax_is_empty(rows, window):
    real = mask(*rows).bool()
    visible = describe_tokens(state(B, S, D), attention_mask=real).visible(window)[:, 0]
    assert visible.any(-1).all()
    assert torch.equal(visible[~real], torch.eye(S).bool().expand(B, S, S)[~real])
    assert not (visible & ~real[:, None] & ~torch.eye(S).bool()).any()


# -- the loss and its gradients


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_against_torch(name):
    h, v, real = state(B, S, D), state(B, S, D, seed=5), mask("111111", "111100")
    block = block_of(name, h, attention_mask=real)
    loss, got = loss_and_gradients(block, h, v, mask=real)
    # Our Ouro's own ops answer a Dual, not torch.func.jvp.
    reference = looped_block(ouro(), attention_mask=real) if name == "own-ouro" else block
    parameters = dict(reference.named_parameters())
    leaves = [parameters[key] for key, _ in block.named_parameters()]
    u = v * real[..., None]
    u = u / u.square().sum((1, 2), keepdim=True).sqrt()
    with sdpa_kernel(SDPBackend.MATH), WrittenOutNorm():
        jv = torch.func.jvp(reference, (h,), (u,))[1] * real[..., None]
        expected = jv.square().sum((1, 2)).mean()
        gradients = torch.autograd.grad(expected, leaves, allow_unused=True)
    assert relative_error(loss, expected) <= BLOCK
    for p, mine, theirs in zip(leaves, got, gradients, strict=True):
        if mine is None or theirs is None:
            for grad in (mine, theirs):
                assert grad is None or grad.abs().max() <= 1e-12, p.shape
        else:
            assert relative_error(mine, theirs) <= BLOCK, p.shape


def padded(x, real):
    """A document spread over the real places of a row, large values on the pads."""
    wide = 1e3 * state(1, real.shape[1], D, seed=7)
    wide[real] = x[0]
    return wide


def rows(name):
    """Where the pads may be; a sliding window counts places, pads between tokens included."""
    if name in HUGINN:
        return ["111100"]
    windowed = name in ("own-ouro", "ouro-sdpa", "ouro-eager", "mistral", "gemma3")
    return ["111100", "001111", "011110"] + ([] if windowed else ["101101"])


@pytest.mark.parametrize(("name", "row"), [(name, row) for name in MODELS for row in rows(name)])
def test_pads_change_neither_loss_nor_gradient(name, row):
    h, v, inputs = (state(1, 4, D, seed=i) for i in range(3))
    block, real = looped_block(MODELS[name]()), mask(row).bool()
    plain, options = ({"inputs": inputs} if name in HUGINN else {}), {"attention_mask": real}
    if name in HUGINN:
        options["inputs"] = padded(inputs, real)
    out = block(padded(h, real), **options)
    assert out.isfinite().all()
    torch.testing.assert_close(out[real], block(h, **plain)[0], rtol=1e-9, atol=1e-9)
    loss, gradients = loss_and_gradients(block, h, v, kwargs=plain)
    found, other = loss_and_gradients(
        block, padded(h, real), padded(v, real), mask=real, kwargs=options
    )
    assert relative_error(found, loss) <= BLOCK
    same_gradients(other, gradients)


@pytest.mark.parametrize("name", MASKED)
def test_packed_documents_are_as_if_alone(name):
    model, lengths = MODELS[name](), (4, 1, 3)
    h, v, cu = state(1, 8, D), state(1, 8, D, seed=5), documents(*lengths)
    alone, packed = looped_block(model), looped_block(model, cu_seqlens=cu)
    loss, gradients = loss_and_gradients(packed, h, v, cu_seqlens=cu)
    parts = list(zip(h.split(lengths, 1), v.split(lengths, 1), strict=True))
    expected = sum(fused_jsrr(alone, a, v=b) for a, b in parts) / len(parts)
    torch.testing.assert_close(packed(h), torch.cat([alone(a) for a, _ in parts], 1))
    assert relative_error(loss, expected) <= BLOCK
    same_gradients(gradients, torch.autograd.grad(expected, list(alone.parameters()), None, True))


@pytest.mark.parametrize("name", ["own-ouro", "ouro-sdpa", "llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
def test_no_op_falls_back(name, padding):
    h = state(B, S, D)
    real = mask("111111", "011110") if padding else None
    found = explain(block_of(name, h, attention_mask=real), h)
    assert found.fallbacks == []
    fused = {op for op, kind in found.ops if kind == "fused"}
    for part in ("norm", "attention", "rotary", ("gated" if name == "own-ouro" else "mlp:")):
        assert any(part in op.lower() for op in fused), part


def test_a_part_of_the_rows():
    h, real = state(4, S, D), mask("111111", "111100", "110000", "001111")
    block = looped_block(transformers_model("llama"))
    options = {"mask": real, "kwargs": {"attention_mask": real}}
    draws = [
        fused_jsrr(block, h, fraction=0.25, generator=torch.Generator().manual_seed(i), **options)
        for i in range(3)
    ]
    assert all(draw.isfinite() and draw > 0 for draw in draws)
    fixed = looped_block(transformers_model("llama"), attention_mask=real)
    with pytest.raises(ValueError, match=r"attention_mask: .*\[1, 6\], got \[4, 6\].*the call"):
        fused_jsrr(fixed, h, mask=real, fraction=0.25)


# -- the callable


def test_parameters_are_those_of_the_turn():
    model = transformers_model("llama")
    names = dict(looped_block(model).named_parameters())
    expected = {name: p for name, p in model.model.named_parameters() if name.startswith("layers.")}
    assert names == expected
    with_norm = dict(looped_block(model, norm=True).named_parameters())
    assert set(with_norm) - set(names) == {"norm.weight"}
    core = dict(looped_block(huginn()).named_parameters())
    assert {name.split(".")[0] for name in core} == {"adapter", "core_block"}


def test_the_context_is_kept_and_noticed_when_stale():
    block, kept = looped_block(transformers_model("llama")), []
    for h in (state(2, 4, D), state(2, 4, D, seed=9), state(2, 5, D)):
        block(h)
        kept.append(block._kept[1])
    assert kept[0] is kept[1]
    assert kept[1] is not kept[2]

    real = mask("111111", "111111")
    block, h = looped_block(transformers_model("llama"), attention_mask=real), state(B, S, D)
    before = block(h)
    real[1, 0] = 0
    assert not torch.allclose(block(h)[1, 1:], before[1, 1:])
    with torch.inference_mode():
        looped_block(transformers_model("llama"))(h)
        block(h)
    fused_jsrr(block, h).backward()


def set_rotary(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", lambda model: model.set_attn_implementation("eager")),
        ("mistral", lambda model: setattr(model.config, "sliding_window", 2)),
        ("own-ouro", lambda model: setattr(model.config, "sliding_window", 2)),
        ("llama", lambda model: model.model.rotary_emb.inv_freq.mul_(0.5)),
        ("llama", set_rotary),
        ("huginn", lambda model: model.freqs_cis.mul_(0.5)),
    ],
    ids=["attention", "window", "ouro-window", "rotary-in-place", "rotary-replaced", "huginn"],
)
def test_a_change_of_the_model_is_noticed(name, change):
    model, h, real = MODELS[name](), state(B, S, D), mask("111111", "111100")
    options = {"attention_mask": real} | (
        {"inputs": state(B, S, D, seed=8)} if name in HUGINN else {}
    )
    block = looped_block(model, **options)
    block(h)
    change(model)
    assert torch.equal(block(h), looped_block(model, **options)(h))


@pytest.mark.parametrize("name", ["llama", "mistral", "own-ouro"])
def test_nothing_is_kept_of_a_trace(name):
    block, h = looped_block(MODELS[name]()), state(B, S, D)
    expected = looped_block(MODELS[name]())(h)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        block(mode.from_tensor(h))
    assert block._kept is None
    assert torch.equal(block(h), expected)


def test_a_traced_block_takes_masks_and_positions():
    h, model = state(B, S, D), transformers_model("mistral")
    for name, value in (
        ("attention_mask", mask("111111", "111100")),
        ("position_ids", torch.tensor([0, 1, 2, 0, 1, 2])),
    ):
        block = looped_block(model, **{name: value})
        expected = looped_block(model, **{name: value})(h)
        torch.testing.assert_close(make_fx(block)(h)(h), expected)
        torch.testing.assert_close(block(h), expected)


def test_a_context_from_inference_mode_is_not_trained_with():
    block = looped_block(transformers_model("llama"), attention_mask=mask("111111", "111100"))
    h = state(B, S, D)
    with torch.inference_mode():
        before = block(h)
    assert block._kept is not None
    fused_jsrr(block, h).backward()
    assert torch.equal(block(h), before)


def test_a_mask_from_inference_mode_is_read_at_every_call():
    with torch.inference_mode():
        real = mask("111111", "111100")
    block, h = looped_block(transformers_model("llama"), attention_mask=real), state(B, S, D)
    block(h)
    with torch.inference_mode():
        real.fill_(1)
    torch.testing.assert_close(block(h), looped_block(transformers_model("llama"))(h))


def test_what_runs_a_state_already_is_left_alone():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])
            self.model = huginn()

        def forward(self, h):
            return self.layers[0](h)

    class Named(Mine):
        """A map of states, whatever its argument is called."""

        def forward(self, tokens):
            return self.layers[0](tokens)

    named = Named()
    named.model, named.norm = None, nn.LayerNorm(4)
    assert looped_block(named) is named
    for block in (Mine(), nn.Sequential(nn.Linear(4, 4)), torch.tanh, nn.Linear(4, 4)):
        assert looped_block(block) is block
    model = LoopedLM(LoopedConfig(8, 8, d_model=16, n_heads=2, d_ff=24))
    assert looped_block(model) is model.block


def test_a_list_of_layers():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).double(), nn.Tanh()]
    h = state(2, 3, 4)
    for given in (layers, nn.ModuleList(layers)):
        block = looped_block(given)
        assert torch.equal(block(h), layers[1](layers[0](h)))
        assert len(list(block.parameters())) == 2


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)


def test_wrapped_models_are_found():
    model, h = transformers_model("llama"), state(B, S, D)
    expected = looped_block(model)(h)

    assert torch.equal(looped_block(Wrapper(model))(h), expected)
    assert torch.equal(looped_block(torch.compile(model))(h), expected)
    own = LoopedLM(LoopedConfig(8, 8, d_model=16, n_heads=2, d_ff=24))
    for wrapped in (Wrapper(own), torch.compile(own), Wrapper(torch.compile(own))):
        assert looped_block(wrapped) is own.block
    plain = Wrapper(nn.Linear(4, 4))
    assert looped_block(plain) is plain


# -- errors


class NeedsMore(nn.Module):
    def forward(self, h, bias):
        return h + bias


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)

    def forward(self, input_ids):
        return self.embed(input_ids)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (Encoder, {}, TypeError, r"model: expected Ouro .*Huginn .*`layers`.*got Encoder"),
        (lambda: nn.ModuleDict(), {}, TypeError, r"model: expected .*got ModuleDict"),
        (lambda: 3, {}, TypeError, r"model: expected .*got int"),
        (lambda: [NeedsMore()], {}, TypeError, r"NeedsMore needs 'bias'"),
        (lambda: [torch.tanh], {}, TypeError, r"list of modules"),
        (
            lambda: llama_with().model.layers,
            {},
            TypeError,
            "LlamaDecoderLayer needs 'position_embeddings'; of a decoder, pass the model itself",
        ),
        (lambda: torch.tanh, {"attention_mask": mask("1")}, ValueError, "attention_mask: expected"),
        (llama_with, {"inputs": state(1, 1, D)}, ValueError, "inputs: expected None"),
        (llama_with, {"layers": 2}, TypeError, "layers: expected a slice, got int"),
        (llama_with, {"layers": slice(9, 9)}, ValueError, "layers: expected some of the 3"),
        (
            lambda: llama_with(layer_types=["linear_attention"] * 3),
            {},
            ValueError,
            "got linear_attention",
        ),
        (lambda: llama_with(is_causal=False), {}, ValueError, "causal attention"),
        (huginn, {"norm": True}, ValueError, "norm: expected None"),
        (huginn, {"layers": slice(1)}, ValueError, "layers: expected None"),
        (huginn, {"cu_seqlens": documents(2, 4)}, ValueError, "cu_seqlens: expected None for Hug"),
    ],
)
def test_what_can_not_be_a_block(make, options, error, message):
    with pytest.raises(error, match=message):
        looped_block(make(), **options)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (llama_with, {"attention_mask": mask("111")}, ValueError, r"\[2, 6\], got \[1, 3\]"),
        (
            llama_with,
            {"attention_mask": torch.zeros(B, S).masked_fill(mask("111100") == 0, -torch.inf)},
            ValueError,
            "attention_mask: expected 1 on real tokens and 0 on pads, got other values",
        ),
        (own_ouro, {"attention_mask": 2 * mask("111111", "111100")}, ValueError, "other values"),
        (
            own_ouro,
            {"position_ids": torch.arange(3)},
            ValueError,
            r"position_ids: .*\[2, 6\], got \[3\].*hand it over with the call",
        ),
        (
            huginn,
            {"inputs": state(B, S, D), "position_ids": torch.tensor([0, 1, 2, 0, 1, 2])},
            ValueError,
            "position_ids: Huginn takes no attention mask.*got packed documents",
        ),
        (llama_with, {"attention_mask": [1]}, TypeError, "attention_mask: expected a tensor"),
        (llama_with, {"position_ids": torch.ones(6)}, TypeError, "position_ids: expected integers"),
        (llama_with, {"position_ids": torch.arange(4)}, ValueError, r"position_ids: .*got \[4\]"),
        (
            llama_with,
            {"cu_seqlens": documents(6)},
            ValueError,
            r"h: expected shape \[1, total, D\]",
        ),
        (llama_with, {"length": 6}, TypeError, "length: expected one of"),
        (
            lambda: llama_with(_attn_implementation_internal="flex_attention"),
            {},
            ValueError,
            "'sdpa' or 'eager'.*flex_attention",
        ),
        (huginn, {}, ValueError, "inputs: expected Huginn's injected input"),
        (huginn, {"inputs": state(1, S, D)}, ValueError, r"inputs: .*\[2, 6, 16\], got \[1, 6"),
        (
            huginn,
            {"inputs": state(B, S, D), "attention_mask": mask("011111", "111111")},
            ValueError,
            "attention_mask: Huginn takes no attention mask.*before or between",
        ),
    ],
)
def test_what_can_not_be_given_at_the_call(make, options, error, message):
    block = looped_block(make())
    with pytest.raises(error, match=message):
        block(state(B, S, D), **options)


def test_packed_rows_that_can_not_be():
    block, h = looped_block(transformers_model("llama")), state(1, S, D)
    with pytest.raises(ValueError, match=r"cu_seqlens: .*total = 6, got \[0, 4\]"):
        block(h, cu_seqlens=documents(4))
    with pytest.raises(TypeError, match="cu_seqlens: expected integers"):
        block(h, cu_seqlens=torch.ones(2))
    with pytest.raises(ValueError, match="attention_mask: expected None"):
        block(h, cu_seqlens=documents(6), attention_mask=mask("111111"))
    with pytest.raises(ValueError, match="cu_seqlens: expected None for Huginn"):
        looped_block(huginn(), inputs=h)(h, cu_seqlens=documents(2, 4))
    with pytest.raises(ValueError, match="at most 8 tokens"):
        looped_block(huginn(), inputs=state(1, 9, D))(state(1, 9, D))


@pytest.mark.parametrize("name", MODELS)
def test_every_block_refuses_alike(name):
    block, h = looped_block(MODELS[name]()), state(1, S, D)
    with pytest.raises(ValueError, match=r"h: expected shape \[B, S, D\], got \[6, 16\]"):
        block(state(S, D))
    if name in MASKED:
        expected = "position_ids: expected None when cu_seqlens is given, got a tensor"
        with pytest.raises(ValueError, match=expected):
            block(h, cu_seqlens=documents(6), position_ids=torch.arange(6))
        expected = "position_ids: expected positions that rise .* attention_mask is given"
        for real in (mask("111111"), mask("011111")):
            with pytest.raises(ValueError, match=expected):
                block(h, attention_mask=real, position_ids=torch.tensor([0, 1, 2, 0, 1, 2]))


def test_masks_of_floats():
    block, h, real = (
        looped_block(transformers_model("llama")),
        state(B, S, D),
        mask("111111", "111100"),
    )
    assert torch.equal(block(h, attention_mask=real.double()), block(h, attention_mask=real))
    on_device = torch.ones(B, S, device="meta")
    with pytest.raises(TypeError, match=r"attention_mask: .*integers on meta, got torch.float32"):
        check_tokens(h, attention_mask=on_device)
    check_tokens(h, attention_mask=on_device.long())
