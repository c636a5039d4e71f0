"""Models whose weights lie elsewhere or are no plain tensors: offloaded by accelerate, quantised by
torchao, hooked. They compute what the same weights in memory compute, or its penalty."""

import copy

import pytest
import torch
from packaging.version import Version
from torch import nn

pytest.importorskip("transformers")

import transformers
from decoder_models import decoder
from families_of_transformers import FAMILIES, greedy, ids, make
from two_devices import DEVICES, TwoDevices, device_of, put, spread

from stars_fast import fused_jsrr, fused_jvp
from stars_fast.models.looped_block import looped_block
from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM
from stars_fast.models.plain_linear import is_plain, is_plain_linear

MODELS = ["llama", *FAMILIES]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def penalty(model, turns=2):
    """||J v||^2 at the state after some turns, and its gradient in what can have one."""
    with torch.no_grad():
        out = model(ids(2), turns=turns, output_hidden_states=True)
    h = out.hidden_states[-1]
    needs = model.config.model_type == "huginn_raven"
    block = looped_block(model, **({"inputs": out.inputs} if needs else {}))
    v = torch.randn(h.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # With the output, for hooks on a layer not to change what is computed: norms round in fp32
    return fused_jsrr(block, h, v=v.to(h.dtype), return_output=True)[1]


def everything(model):
    """Logits, loss, tokens and, of a looped model, the penalty."""
    with torch.no_grad():
        found = [model(ids(2)).logits, model(ids(2), labels=ids(2)).loss, greedy(model, ids())]
    return found if model.config.model_type == "llama" else [*found, penalty(model).detach()]


def assert_same(found, expected, **close):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **(close or CLOSE))


# -- offloaded


def on_the_cpu(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model)


def on_the_disk(model, folder):
    from accelerate import disk_offload

    return disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def by_a_device_map(model, folder):
    model.save_pretrained(folder / "saved")
    return type(model).from_pretrained(
        folder / "saved",
        dtype=torch.float64,
        device_map=dict.fromkeys((name for name, _ in model.named_children()), "disk"),
        offload_folder=folder / "offloaded",
    )


def by_little_memory(model, folder):
    model.save_pretrained(folder / "saved", max_shard_size="100KB")
    loaded = type(model).from_pretrained(
        folder / "saved",
        dtype=torch.float64,
        device_map="auto",
        max_memory={"cpu": "120KB"},
        offload_folder=folder / "offloaded",
    )
    assert "disk" in loaded.hf_device_map.values()
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "offload",
    [on_the_cpu, on_the_disk, by_a_device_map, by_little_memory],
    ids=lambda f: f.__name__,
)
def test_offloaded_weights_are_the_same_model(name, offload, tmp_path):
    pytest.importorskip("accelerate")
    by_map = offload in (by_a_device_map, by_little_memory)
    if by_map and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("transformers 5.5 offloads no Llama to a disk in fp64")
    model = make(name)
    expected = everything(model)
    assert_same(everything(offload(model, tmp_path)), expected)


# -- quantised


def quantised(model, config):
    """The quantised model, and one with the same weights as plain numbers."""
    from torchao.quantization import quantize_

    quantize_(model, config)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "dequantize") and hasattr(weight, "__tensor_flatten__"):
            module.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
    return model, plain


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_weights_in_int8_are_the_weights_that_they_stand_for(name):
    quantization = pytest.importorskip("torchao.quantization")
    model, plain = quantised(make(name, torch.float32), quantization.Int8WeightOnlyConfig())
    assert not is_plain_linear(model.get_output_embeddings())
    assert is_plain_linear(plain.get_output_embeddings())
    assert_same(everything(model), everything(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_activations_in_int8_err_by_their_rounding(name):
    quantization = pytest.importorskip("torchao.quantization")
    expected = everything(make(name, torch.float32))
    config = quantization.Int8DynamicActivationInt8WeightConfig()
    found = everything(quantised(make(name, torch.float32), config)[0])
    for i in (0, 1, *range(3, len(expected))):  # tokens may be others
        error = (found[i] - expected[i]).norm() / expected[i].norm()
        # Rounding by up to 1/256 of a row's largest in each product, of up to 60 in a row.
        assert 0 < error < 60 / 256


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_adapters_train_on_weights_in_int8(name):
    quantization = pytest.importorskip("torchao.quantization")
    peft = pytest.importorskip("peft")
    model, plain = quantised(make(name, torch.float32), quantization.Int8WeightOnlyConfig())
    gradients = []
    for base in (plain, model):
        names = [
            n for n, m in base.named_modules()
            if isinstance(m, nn.Linear) and "head" not in n and "gate" not in n.rsplit(".", 1)[-1]
        ]  # fmt: skip
        torch.manual_seed(0)
        adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=names, r=2)).train()
        loss = adapted(input_ids=ids(2), labels=ids(2)).loss
        if name != "llama":
            loss = loss + penalty(adapted.get_base_model())
        loss.backward()
        gradients.append({n: p.grad for n, p in adapted.named_parameters() if p.grad is not None})
    expected, found = gradients
    assert expected.keys() == found.keys()
    assert any("lora_B" in n and grad.abs().max() > 0 for n, grad in found.items())
    for n, grad in expected.items():
        torch.testing.assert_close(found[n], grad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_with_fake_quantised_weights(name):
    qat = pytest.importorskip("torchao.quantization.qat")
    from torchao.quantization import quantize_

    fake = qat.IntxFakeQuantizeConfig(torch.int4, group_size=16)
    model = make(name, torch.float32).train()
    before = model(ids(2), labels=ids(2)).loss.item()
    wide = lambda module, n: isinstance(module, nn.Linear) and module.in_features % 16 == 0  # noqa: E731
    quantize_(model, qat.QATConfig(weight_config=fake, step="prepare"), filter_fn=wide)
    loss = model(ids(2), labels=ids(2)).loss
    if name != "llama":
        loss = loss + penalty(model)
    loss.backward()
    assert loss.item() != before
    head = model.get_output_embeddings().weight
    assert head.grad.isfinite().all()
    assert head.grad.abs().max() > 0


# -- hooked


PLACES = {
    "ouro": ["model.layers.0", "model.layers.1.input_layernorm", "model.layers.0.mlp",
             "model.layers.0.post_attention_layernorm", "model.layers.1.self_attn.q_proj",
             "model.norm"],
    "looped": ["model.block.0", "model.block.0.mlp.up_proj", "model.block.1.input_layernorm"],
    "huginn": ["transformer.core_block.0", "transformer.core_block.0.norm_2",
               "transformer.core_block.1.mlp.proj", "transformer.adapter"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "place"), [(n, each) for n in PLACES for each in PLACES[n]])
def test_a_hook_is_met_by_tensors_and_pairs_alike(name, place):
    """Its change of the input is in the output, and in the tangent: none goes missing."""
    model = make(name)
    h = model(ids(), turns=1, output_hidden_states=True).hidden_states[-1].detach()
    given = {}
    if name == "huginn":
        given = {"inputs": model(ids(), turns=1).inputs.detach()}
    v = torch.randn(h.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    handle = model.get_submodule(place).register_forward_pre_hook(
        lambda module, args: (args[0] + args[0].square(), *args[1:])
    )
    block = looped_block(model, **given)
    out, tangent = fused_jvp(block, h, v)
    # A Llama's own norm rounds to fp32 outside of a pass.
    close = {"rtol": 1e-4, "atol": 1e-4} if name == "looped" else CLOSE
    step = 1e-2 if name == "looped" else 1e-3
    ahead, behind = block(h + step * v), block(h - step * v)
    further, before = block(h + 2 * step * v), block(h - 2 * step * v)
    expected = (8 * (ahead - behind) - (further - before)) / (12 * step)
    torch.testing.assert_close(out, block(h), **close)
    wide = {"rtol": 1e-3, "atol": 1e-3} if name == "looped" else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(tangent, expected, **wide)
    handle.remove()
    assert (block(h) - out).norm() > 1e-3 * out.norm()


def test_plain_modules_are_told_from_others():
    plain = nn.Linear(3, 3)
    assert is_plain(plain)
    assert is_plain_linear(plain)
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        hooked = copy.deepcopy(plain)
        getattr(hooked, f"register_{kind}_hook")(lambda *call: None)
        assert not is_plain(hooked), kind
    moved = copy.deepcopy(plain)
    moved.forward = lambda x: x
    assert not is_plain(moved)
    assert not is_plain_linear(nn.RMSNorm(3))
    assert is_plain(nn.RMSNorm(3))


@pytest.mark.parametrize("name", [*FAMILIES, "add", "adapter"])
@torch.no_grad()
def test_over_two_devices_loss_and_rest_are_those_of_one(name):
    """Families, and injections of a looped decoder, as `device_map="auto"` lays them out."""
    tokens = ids(2)
    if name in FAMILIES:
        model = make(name)
    else:
        model = LoopedDecoderForCausalLM.from_decoder(decoder("llama"), injection=name)
    expected, seven = model(tokens, labels=tokens, turns=3), torch.tensor(7)
    of_seven = model(tokens, labels=tokens, turns=3, num_items_in_batch=seven)
    for tol in (0.7, 0.5, 0.3, 0.1):  # until some tokens rest before others
        resting = {"turns": 6, "tol": tol, "tol_per": "token"}
        rests = model(tokens, **resting)
        if rests.turns.unique().numel() > 1:
            break
    spread(model)
    with TwoDevices():
        here = put(tokens, DEVICES[0])
        found = model(here, labels=here, turns=3)
        rested = model(here, **resting)
        counted = model(here, labels=here, turns=3, num_items_in_batch=put(seven, DEVICES[0]))
    torch.testing.assert_close(counted.loss, of_seven.loss, **CLOSE)
    assert device_of(found.logits) == device_of(found.loss)
    torch.testing.assert_close(rested.logits, rests.logits, **CLOSE)
    assert torch.equal(rested.turns, rests.turns)
    assert rests.turns.unique().numel() > 1
    torch.testing.assert_close(found.loss, expected.loss, **CLOSE)
