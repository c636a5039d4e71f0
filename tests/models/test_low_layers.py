"""Layers on bf16 copies of their weights: the same forward as autocast's, to the last bit, and
gradients of fp32 sums; how often weights are cast and their gradients added, counted."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.weight_traffic import Matrices
from stars_fast import fused_jsrr, looped_block
from stars_fast.models.gpt import GPTBlock
from stars_fast.models.looped import LoopedLM
from stars_fast.models.looped_config import LoopedConfig
from stars_fast.models.low_forward import joint_low
from stars_fast.models.low_layers import LowLayers
from stars_fast.training.step.turns import by_layer, recomputed, run_turns

pytest.importorskip("transformers")
ouro_model = pytest.importorskip("stars_fast.models.ouro.causal_lm")

TURNS = 3
BF16 = torch.bfloat16


def ouro(layers=2):
    torch.manual_seed(0)
    config = ouro_model.OuroConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return ouro_model.OuroForCausalLM(config).train()


def gpt():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "max_length": 8, "d_model": 32, "n_heads": 4, "d_ff": 48}
    return LoopedLM(LoopedConfig(n_layers=2, **sizes)).train()


def layers_of(model):
    return model.block if isinstance(model, LoopedLM) else model.model.layers


def block_of(model):
    return model.block if isinstance(model, LoopedLM) else looped_block(model)


def loss_of(model, how="kept", h=None):
    """Loss after some turns of a state, and the penalty at the last."""
    torch.manual_seed(1)
    h = torch.randn(2, 6, 32) if h is None else h
    block = block_of(model)
    v = torch.randn(2, 6, 32, dtype=h.dtype)
    layered = by_layer(block, model)
    turns = {
        "kept": lambda h: block(h),
        "turns": lambda h: recomputed(block, h),
        "layers": lambda h: layered(recomputed)(h),
    }[how]
    for _ in range(TURNS):
        h = turns(h)
    return h.square().mean() + fused_jsrr(block, h, v=v)


def gradients(model, low=False, how="kept", uses=1):
    """Of `uses` backward passes, by name; under autocast with or without copies."""
    model = copy.deepcopy(model)
    layers = LowLayers(model, [layers_of(model)] if low else [])
    layers.refresh()
    losses = []
    for _ in range(uses):
        with layers.used():
            with torch.autocast("cpu", BF16):
                loss = loss_of(model, how)
            loss.backward()
        losses.append(loss.item())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, found


@pytest.mark.parametrize("make", [ouro, gpt])
def test_the_forward_is_autocast_s_and_gradients_are_no_worse(make):
    model = make()
    exact = copy.deepcopy(model).double()
    torch.manual_seed(1)
    loss_of(exact, h=torch.randn(2, 6, 32).double()).backward()
    expected = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    before, theirs = gradients(model)
    after, mine = gradients(model, low=True)
    assert before == after
    assert mine.keys() == theirs.keys()
    errors = {}
    for name, truth in expected.items():
        errors[name] = [float((g[name].double() - truth).norm()) for g in (mine, theirs)]
        assert mine[name].dtype == torch.float32
    assert any(not torch.equal(mine[name], theirs[name]) for name in mine)
    # Both are sums of the same products, here with one rounding less each
    assert sum(a for a, _ in errors.values()) < 1.02 * sum(b for _, b in errors.values())


@pytest.mark.parametrize("make", [ouro, gpt])
@pytest.mark.parametrize("how", ["turns", "layers"])
def test_recomputing_takes_the_same_copies(make, how):
    model = make()
    kept, expected = gradients(model, low=True)
    again, found = gradients(model, low=True, how=how)
    assert kept == again
    assert all(torch.equal(found[name], g) for name, g in expected.items())


def test_micro_batches_add_up():
    once, twice = (gradients(gpt(), low=True, uses=uses)[1] for uses in (1, 2))
    for name, g in once.items():
        # Sums in fp32: of the same terms twice, in another order
        torch.testing.assert_close(twice[name], 2 * g, rtol=1e-5, atol=1e-7)


def counted(low, how, uses=2):
    """Casts and sums of a step of some micro-batches of 3 turns and a dual one, 2 layers."""
    model = ouro()
    layers = LowLayers(model, [layers_of(model)] if low else [])
    with Matrices(p for p in layers_of(model).parameters() if p.dim() == 2) as counts:
        layers.refresh()
        for _ in range(uses):
            with layers.used():
                with torch.autocast("cpu", BF16):
                    loss = loss_of(model, how)
                loss.backward()
    return counts.found


@pytest.mark.parametrize("how", ["kept", "layers"])
def test_weights_are_cast_once_a_step_and_never_summed_in_bf16(how):
    """14 matrices; 4 turns (the dual one too) in each of 2 micro-batches."""
    before, after = counted(False, how), counted(True, how)
    assert after["cast"] == 14
    assert before["cast"] == 2 * 14 * (1 if how == "kept" else 1 + TURNS)
    assert after["sum"] == 0
    assert before["sum"] == 2 * 14 * (1 + TURNS - 1) if how == "kept" else before["sum"] > 0
    # On the CPU a product is added after it is made: all uses but each matrix's first
    assert after["sum in fp32"] <= 14 * (2 * (TURNS + 1) - 1)


def test_maps_that_share_an_input_share_a_copy_and_its_gradient():
    model = ouro()
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    maps = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(2, 6, 32)
    layers = LowLayers(model, [model.model.layers])
    layers.refresh()
    assert joint_low(maps, x) is None
    with layers.used():
        assert joint_low(maps, x) is None  # no autocast: fp32 throughout
        assert attention.q_proj(x).dtype == torch.float32
        with torch.autocast("cpu", BF16):
            low = joint_low(maps, x)
            assert low.rows == [32, 16, 16]
            assert joint_low([mlp.gate_proj, mlp.up_proj], x).rows == [48, 48]
            assert joint_low(maps[:2], x) is None
            assert joint_low(maps[::-1], x) is None
            parts = [each(x) for each in maps]
            torch.testing.assert_close(
                torch.cat(parts, -1), torch.nn.functional.linear(x.to(BF16), low.weight),
                rtol=2**-7, atol=2**-7,  # bf16 of two products: a unit in the last place
            )  # fmt: skip
    assert layers.nbytes == 2 * sum(p.numel() for p in layers_of(model).parameters() if p.dim() > 1)
    assert not any("forward" in vars(each) for each in model.modules())


def test_what_is_more_than_its_weight_is_left_as_it_is():
    model = ouro(layers=1)
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight  # two ouro_model' weight
    layer.self_attn.q_proj.register_forward_hook(lambda module, args, out: None)
    layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.bfloat16()
    layer.self_attn.v_proj.weight.requires_grad_(False)
    layers = LowLayers(model, [layer])
    seen = []
    with layers.used():
        changed = {name for name, each in layer.named_modules() if "forward" in vars(each)}
        assert changed == {"self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"}
        layer.self_attn.k_proj.register_forward_hook(lambda *_: seen.append(1))
    with layers.used(), torch.autocast("cpu", BF16):
        assert "forward" not in vars(layer.self_attn.k_proj)
        layer.self_attn.k_proj(torch.randn(2, 32))
    assert seen == [1]


@pytest.mark.parametrize("change", ["replaced", "frozen", "hooked", "accumulated"])
def test_parameters_that_are_not_what_they_were_go_without_their_copy(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers = LowLayers(model, [model])
    layers.refresh()
    first, seen = model[0], []
    if change == "replaced":
        first.weight = nn.Parameter(first.weight.detach() + 1)
    elif change == "frozen":
        first.weight.requires_grad_(False)
    elif change == "hooked":
        first.weight.register_hook(lambda grad: seen.append(1) or 2 * grad)
    else:
        first.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(1))
    x = torch.randn(3, 4)
    with torch.autocast("cpu", BF16):
        y = model(x)
    y.sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with layers.used():
        assert "forward" not in vars(first)
        assert "forward" in vars(model[1])
        with torch.autocast("cpu", BF16):
            found = model[1](input=model[0](x))
        found.sum().backward()
    assert torch.equal(found, y)
    assert len(seen) == (2 if change in ("hooked", "accumulated") else 0)
    for p, grad in zip(model.parameters(), expected, strict=True):
        # One use: the product of bf16 factors, rounded to bf16, as autocast's
        assert p.grad is None if grad is None else torch.equal(p.grad, grad)


def test_turns_without_a_graph_leave_nothing():
    model = gpt()
    layers = LowLayers(model, [model.block])
    layers.refresh()
    with layers.used(), torch.autocast("cpu", BF16):
        states = run_turns(model.block, torch.randn(2, 6, 32).to(BF16), 4, backprop_turns=1)
    with layers.used():
        states[-1].float().sum().backward()
    assert isinstance(model.block[0], GPTBlock)
    assert all(p.grad is not None for p in model.block.parameters())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
