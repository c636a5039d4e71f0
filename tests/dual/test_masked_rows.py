"""Attention in which some queries see no key: 0 where PyTorch gives 0, and never NaN."""

import pytest
import torch
import torch.nn.functional as F
from oracle import WrittenOutAttention, jvp_and_gradients, relative_error
from torch.nn.attention import SDPBackend, sdpa_kernel

from stars_fast import fused_jsrr, fused_jvp
from stars_fast.dual.dual_pass import dual_pass


def state(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KEEP = torch.ones(4, 4, dtype=torch.bool)
KEEP[1] = False
KEEP[2, 3] = False
LOWEST = torch.finfo(torch.float64).min
MASKS = {
    "boolean": KEEP,
    "infinite": torch.zeros(4, 4, dtype=torch.float64).masked_fill(~KEEP, -torch.inf),
    "lowest": torch.zeros(4, 4, dtype=torch.float64).masked_fill(~KEEP, LOWEST),
}


def attend(h, five=False, **options):
    """h [2, 4, 24] -> [2, 4, 8]."""
    q, k, v = h.view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
    if five:
        q, k, v = q[None], k[None], v[None]
    out = F.scaled_dot_product_attention(q, k, v, **options)
    return (out[0] if five else out).transpose(1, 2).flatten(2)


def with_fixed_draws(f):
    def run(*inputs):
        torch.manual_seed(5)
        return f(*inputs)

    return run


def check(f, leaves_of=lambda h: [h]):
    """Value, tangent and gradients against attention written out, row of 0 included."""
    f = with_fixed_draws(f)
    h, v = state(2, 4, 24).requires_grad_(), state(2, 4, 24, seed=4)
    leaves = leaves_of(h)
    y_bar, y_dot_bar = state(2, 4, 8, seed=6), state(2, 4, 8, seed=7)
    with WrittenOutAttention():
        y, y_dot, expected = jvp_and_gradients(f, h, v, leaves, y_bar, y_dot_bar)
    with sdpa_kernel(SDPBackend.MATH):
        assert relative_error(y, f(h)) <= 1e-12
    out = dual_pass(f, torch.stack((h, v)), (), {})
    assert relative_error(out[0], y) <= 1e-12
    assert relative_error(out[1], y_dot) <= 1e-12
    got = torch.autograd.grad((out * torch.stack((y_bar, y_dot_bar))).sum(), leaves)
    for mine, theirs in zip(got, expected, strict=True):
        assert relative_error(mine, theirs) <= 1e-12
    return out


@pytest.mark.parametrize("five", [False, True], ids=["4d", "5d"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_that_see_nothing(mask, dropout, five):
    out = check(lambda h: attend(h, five, attn_mask=MASKS[mask], dropout_p=dropout))
    assert (mask == "lowest") == bool(out[:, :, 1].any())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_bias_with_a_gradient(dropout):
    bias = MASKS["infinite"].clone().requires_grad_()
    check(lambda h: attend(h, attn_mask=bias, dropout_p=dropout), lambda h: [h, bias])


def test_a_mask_that_depends_on_the_state():
    check(lambda h: attend(h, attn_mask=MASKS["infinite"] + h[:, None, :, :4].tanh()))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 3), (3, 5), (3, 0)])
def test_other_numbers_of_keys(queries, keys, causal, dropout):
    q, k = state(1, 2, queries, 4), state(1, 2, keys, 4, seed=5)
    options = {"is_causal": causal, "dropout_p": dropout}
    f = with_fixed_draws(lambda q: F.scaled_dot_product_attention(q, k, k, **options))
    y, y_dot = fused_jvp(f, q, q.cos())
    with sdpa_kernel(SDPBackend.MATH):
        expected, expected_dot = torch.func.jvp(f, (q,), (q.cos(),))
    assert relative_error(y, expected) <= 1e-12
    assert relative_error(y_dot, expected_dot) <= 1e-12


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_multi_head_attention_with_every_key_padded(dropout):
    attention = torch.nn.MultiheadAttention(24, 2, dropout=dropout, batch_first=True).double()
    padding = torch.tensor([[True] * 4, [False, False, True, True]])

    def block(h):
        return attention(h, h, h, key_padding_mask=padding, need_weights=False)[0]

    h = state(2, 4, 24)
    out, tangent = fused_jvp(with_fixed_draws(block), h, state(2, 4, 24, seed=4))
    with sdpa_kernel(SDPBackend.MATH):
        expected = with_fixed_draws(block)(h)
    assert relative_error(out, expected) <= 1e-12
    assert not tangent[0].any()
    loss = fused_jsrr(block, h)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_left_padded_gpt2_in_training(implementation):
    """The published configuration drops out 10 % of the attention weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=11, attn_implementation=implementation
    )
    assert config.attn_pdrop > 0
    model = transformers.GPT2Model(config).double().train()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

    def block(h):
        return model(inputs_embeds=h, attention_mask=mask, use_cache=False).last_hidden_state

    h, v = state(2, 5, 16), state(2, 5, 16, seed=4) * mask[..., None]
    out, tangent = fused_jvp(with_fixed_draws(block), h, v)
    seeded = with_fixed_draws(block)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        assert relative_error(out, seeded(h)) <= 1e-9
        numeric = (seeded(h + 1e-6 * v) - seeded(h - 1e-6 * v)) / 2e-6
    real = mask.bool()
    assert relative_error(tangent[real], numeric[real]) <= 1e-7
    fused_jsrr(block, h, mask=mask).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    assert all(grad.isfinite().all() for grad in grads)
