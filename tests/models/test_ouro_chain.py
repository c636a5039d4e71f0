"""Ouro's layers with the norm that closes one and the next one's first as one op: the turn is what
it was, and nothing that waits for a call of a layer is passed by."""

import pytest
import torch
from oracle import relative_error
from tolerances import BLOCK

from stars_fast import fused_jvp, looped_block

pytest.importorskip("transformers")
from benchmarks.launches import of_a_layer_turn
from stars_fast.models.ouro import OuroConfig, OuroModel, layers
from stars_fast.ops.selective import recording, selective
from stars_fast.training.scale.measure import KeptBytes
from stars_fast.training.step.turns import by_layer, recomputed


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = OuroConfig(
        vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = OuroModel(config).train()
    for parameter in model.parameters():  # norms of their own weights
        torch.nn.init.normal_(parameter, 0.3 if parameter.dim() == 2 else 1.0, 0.3)
    return model


@pytest.fixture
def chained(monkeypatch):
    """chained(whether): whether turns on the CPU are."""
    return lambda wanted: monkeypatch.setattr(layers, "CHAINED_ON", {"cpu"} if wanted else set())


def of_turns(model, dtype, dual, way="kept"):
    """State, tangent and all gradients of two turns, with a cotangent of both."""
    model.to(dtype).zero_grad()
    torch.manual_seed(1)
    h, v, a, b = torch.randn(4, 2, 5, 32).to(dtype)
    h.requires_grad_()
    block = looped_block(model)
    turn = block if way == "kept" else by_layer(block, model)(recomputed)
    if way == "run":  # as `run_turns` runs layers that are recomputed
        turn = selective(turn)
    out = fused_jvp(turn, turn(h), v) if dual else (turn(turn(h)),)
    sum((y * bar).sum() for y, bar in zip(out, (a, b), strict=False)).backward()
    named = model.named_parameters()
    return [*out, h.grad, *(p.grad.clone() for _, p in named if p.grad is not None)]


@pytest.mark.parametrize("dual", [False, True], ids=["plain", "dual"])
def test_a_chained_turn_is_the_turn(model, chained, dual):
    chained(False)
    expected = of_turns(model, torch.float64, dual)
    chained(True)
    found = of_turns(model, torch.float64, dual)
    assert len(found) == len(expected) > 3 * 11
    for mine, other in zip(found, expected, strict=True):
        assert relative_error(mine, other) < BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("way", "dual"), [("layers", False), ("layers", True), ("run", False)])
def test_layers_that_are_recomputed_are_chained_too(model, chained, way, dual, dtype):
    chained(True)
    kept, again = (of_turns(model, dtype, dual, each) for each in ("kept", way))
    assert all(torch.equal(mine, other) for mine, other in zip(kept, again, strict=True))


def test_a_norm_that_a_layer_starts_from_is_made_again(model, chained):
    """By what is kept: a state for each layer and turn, whether or not norms are chained."""
    h = torch.randn(2, 5, 32, requires_grad=True)
    block = looped_block(model)
    found = []
    for wanted in (False, True):
        chained(wanted)
        with KeptBytes(model) as kept, recording():
            by_layer(block, model)(recomputed)(h)
        found.append(kept.new())
    assert found[1] <= found[0]


def test_what_waits_for_a_call_is_called(model, chained):
    chained(True)
    cpu = torch.device("cpu")
    assert layers.can_chain(model.layers, model.norm, cpu)
    seen = []
    for module in (model.layers[1], model.layers[2].input_layernorm, model.norm):
        hook = module.register_forward_hook(lambda *_: seen.append(1))
        assert not layers.can_chain(model.layers, model.norm, cpu)
        looped_block(model)(torch.randn(1, 3, 32))
        hook.remove()
    assert len(seen) == 3
    model.layers[0].compile()
    assert not layers.can_chain(model.layers, model.norm, cpu)
    chained(False)
    assert not layers.can_chain(model.layers[1:], model.norm, cpu)


def test_launches_of_a_layer_turn():
    """Products 21 (of 7 maps), row ops 8, attention 2, sums: of weight gradients 7, of norms' 4, of
    cotangents 5, of the residual 1; rotary 4."""
    assert of_a_layer_turn("autocast", dual=False) <= 52
    assert of_a_layer_turn("chained", dual=False) <= 35
