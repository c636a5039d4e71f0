"""Hooks of all modules of the process: every module is called then, also where a GPU's arrangement
(norms in one op, maps of one input as one) or a pair would pass it by, and the values stay."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stars_fast import explain, fused_jvp, looped_block
from stars_fast.data.batches import micro_batch
from stars_fast.data.documents import PaddedChats, TokenDocuments
from stars_fast.models.hooks import all_are_hooked, is_hooked
from stars_fast.models.low_layers import LowLayers

pytest.importorskip("transformers")
from families_of_transformers import ids, make

from stars_fast.models.families import loop_of
from stars_fast.models.ouro import layers

KINDS = ["forward_pre", "forward", "full_backward_pre", "full_backward"]
NAMES = ["ouro", "huginn", "looped"]


@pytest.fixture
def hook_all():
    """hook_all(kind, hook): register a hook of all modules; it is gone after the test."""
    handles = []

    def register(kind, hook):
        add = getattr(nn.modules.module, f"register_module_{kind}_hook")
        handles.append(add(hook))
        return handles[-1]

    yield register
    for handle in handles:
        handle.remove()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(layers, "CHAINED_ON", {"cpu"})


def block_and_state(name, dtype=torch.float64):
    model = make(name, dtype)
    out = model(ids(2), turns=1, output_hidden_states=True)
    given = {"inputs": out.inputs.detach()} if name == "huginn" else {}
    return model, looped_block(model, **given), out.hidden_states[-1].detach()


def passes(model, block, h):
    """A turn and a dual one, with the gradients of all."""
    model.zero_grad()
    h = h.clone().requires_grad_()
    v = torch.randn(h.shape, generator=torch.Generator().manual_seed(0), dtype=h.dtype)
    out = [block(h), *fused_jvp(block, h, v)]
    sum(x.square().sum() for x in out).backward()
    return [*out, h.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_module_is_called_for_a_tensor_and_for_a_pair(name, kind, hook_all):
    model, block, h = block_and_state(name)
    expected = passes(model, block, h)
    calls = {}

    def count(module, *_):
        calls[module] = calls.get(module, 0) + 1

    handle = hook_all(kind, count)
    found = passes(model, block, h)
    handle.remove()
    inside = [m for m in block.modules() if isinstance(m, nn.Linear) or "Norm" in type(m).__name__]
    assert {calls.get(module) for module in inside} == {2}
    # A Llama's own norm rounds to fp32 in its forward, a pair's does not where it is recognised
    close = 1e-6 if name == "looped" else 1e-12
    assert len(found) == len(expected) > 10
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).norm() <= close * other.norm()
    passes(model, block, h)
    assert {calls[module] for module in inside} == {2}


def test_maps_that_share_a_copy_are_called_one_by_one(hook_all):
    model, block, h = block_and_state("ouro", torch.float32)
    low = LowLayers(model, [model.model.layers])
    low.refresh()
    seen = []

    def outcome():
        del seen[:]
        with low.used(), torch.autocast("cpu", torch.bfloat16):
            return block(h), list(seen)

    def note(module, *_):
        seen.append(module)

    expected, _ = outcome()
    maps = [m for m in block.modules() if isinstance(m, nn.Linear)]
    with low.used(), torch.autocast("cpu", torch.bfloat16):  # registered while copies are in use
        handle = hook_all("forward", note)
        within = block(h)
    assert set(maps) < set(seen)
    found, called = outcome()
    assert sum(each in maps for each in called) == len(maps)
    handle.remove()
    again, called = outcome()
    assert called == []
    for out in (within, found):  # bf16 through two layers, of sums in another order
        torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_head_is_called_for_the_training_loss(name, hook_all):
    model, _, h = block_and_state(name)
    loop = loop_of(model)
    document = ids()[0].numpy().astype(np.int32), np.array([False] + [True] * 6)
    batch = micro_batch(PaddedChats(TokenDocuments([document] * 2), 0), np.arange(2))
    expected = loop.token_loss(h, batch, 12)
    seen = []
    hook_all("forward", lambda module, *_: seen.append(module))
    found = loop.token_loss(h, batch, 12)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)  # fp64, in another order
    assert model.get_output_embeddings() in seen


def test_a_flop_counter_finds_every_map():
    """It knows modules by such hooks: 2 products of each map's weight for a turn forward."""
    _, block, h = block_and_state("ouro")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        block(h)
    counts = counter.get_flop_counts()
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            found = sum(counts[f"{type(block).__name__}.{name}"].values())
            assert found == 2 * module.weight.numel() * h[..., 0].numel()


def test_the_hook_that_names_for_explain_does_not_count(hook_all):
    model, block, h = block_and_state("ouro")
    before = explain(block, h)
    seen = []

    def look(module, *_):
        seen.append((is_hooked(module), module))

    model.model.layers[0].input_layernorm.register_forward_hook(look)
    chained = explain(block, h)
    assert seen[0] == (True, model.model.layers[0].input_layernorm)
    assert chained.ops != before.ops  # a layer's own hook: its norms are called
    model.model.layers[0].input_layernorm._forward_hooks.clear()
    assert not all_are_hooked()
    hook_all("forward", lambda *_: seen.append((all_are_hooked(), None)))
    assert explain(block, h).ops != before.ops
    assert seen[-1] == (True, None)
