import math

import pytest
import torch
import torch.nn.functional as F

from stars_fast.models.gpt import CausalAttention, GPTBlock, make_norm
from stars_fast.models.looped_config import NORMS, PLACEMENTS, LoopedConfig

B, S, D, H = 3, 7, 16, 4


def config(**fields):
    return LoopedConfig(vocab_size=11, max_length=S, d_model=D, n_heads=H, d_ff=24, **fields)


def normalise(x, module):
    """The norm operators, written out."""
    if isinstance(module, torch.nn.RMSNorm):
        return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt()
    return x if module.weight is None else x * module.weight + module.bias


def written_out(residual, placement, x):
    if placement == "pre":
        return x + residual.f(normalise(x, residual.norm_in))
    if placement == "post":
        return normalise(x + residual.f(x), residual.norm_out)
    y = residual.f(normalise(x, residual.norm_in))
    if placement == "pre-sandwich":
        return x + normalise(y, residual.norm_out)
    return normalise(x + y, residual.norm_out)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_block_is_the_formula_of_its_placement(placement, norm):
    torch.manual_seed(0)
    block = GPTBlock(config(placement=placement, norm=norm)).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    h = torch.randn(B, S, D, dtype=torch.float64)
    expected = written_out(block.mlp, placement, written_out(block.attention, placement, h))
    torch.testing.assert_close(block(h), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_block_is_causal(placement, norm):
    torch.manual_seed(0)
    block = GPTBlock(config(placement=placement, norm=norm)).double()
    h = torch.randn(B, S, D, dtype=torch.float64)
    changed = h.clone()
    changed[:, 4:] = torch.randn(B, S - 4, D, dtype=torch.float64)
    torch.testing.assert_close(block(changed)[:, :4], block(h)[:, :4], rtol=1e-12, atol=1e-12)
    assert (block(changed)[:, 4:] - block(h)[:, 4:]).abs().min() > 1e-6


def test_attention_is_softmax_of_scaled_causal_scores():
    torch.manual_seed(0)
    attention = CausalAttention(D, H).double()
    x = torch.randn(B, S, D, dtype=torch.float64)
    heads = attention.qkv(x).view(B, S, 3, H, D // H)
    scores = torch.einsum("bihd,bjhd->bhij", heads[:, :, 0], heads[:, :, 1]) / math.sqrt(D // H)
    later = torch.ones(S, S).triu(1).bool()
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    mixed = torch.einsum("bhij,bjhd->bihd", weights, heads[:, :, 2]).reshape(B, S, D)
    torch.testing.assert_close(attention(x), attention.out(mixed), rtol=1e-10, atol=1e-10)


def test_parameters_of_the_norms():
    counts = {norm: sum(p.numel() for p in make_norm(norm, D).parameters()) for norm in NORMS}
    assert counts == {"layernorm": 2 * D, "rmsnorm": D, "simplenorm": 0}


@pytest.mark.parametrize(
    ("activation", "function"), [("gelu", F.gelu), ("relu", F.relu), ("silu", F.silu)]
)
def test_activation(activation, function):
    mlp = GPTBlock(config(activation=activation)).mlp.f
    x = torch.randn(B, S, D)
    torch.testing.assert_close(mlp(x), mlp.out(function(mlp.up(x))))


def test_dropout_falls_on_the_sub_layers():
    torch.manual_seed(0)
    block = GPTBlock(config(placement="pre", dropout=0.5))
    h = torch.randn(B, S, D)
    assert not torch.equal(block(h), block(h))
    block.eval()
    torch.testing.assert_close(block(h), block(h), rtol=0, atol=0)


def test_unknown_norm():
    with pytest.raises(ValueError, match=r"norm: expected one of .* got 'batchnorm'"):
        make_norm("batchnorm", D)
