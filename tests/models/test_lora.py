"""Adapters on the shared block: which maps get one, what they compute as a pair of primal and
tangent, their merging, and their folders, which PEFT reads and writes too."""

import copy
import json
import re

import ouro_reference
import pytest
import torch
from decoder_models import decoder
from oracle import assert_dual_matches, assert_matches_differences, randn, relative_error
from ouro_models import checkpoint, tokens
from tolerances import BLOCK

from stars_fast import Dual, explain, fused_jsrr
from stars_fast.base.errors import ConfigError
from stars_fast.base.tree import build
from stars_fast.models.adapter_folder import adapter_base, load_adapter, write_adapter
from stars_fast.models.export import export_run
from stars_fast.models.families.looped_decoder import LoopedDecoderLoop
from stars_fast.models.families.looped_lm import LoopedLoop
from stars_fast.models.families.ouro import OuroFamily, OuroLoop
from stars_fast.models.looped import LoopedLM
from stars_fast.models.looped_block import looped_block
from stars_fast.models.looped_config import LoopedConfig
from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM
from stars_fast.models.lora import LoraConfig, adapt, adapted_layers, fingerprint, target_names
from stars_fast.models.merge import kept_share, merge
from stars_fast.models.ouro import OuroForCausalLM

peft = pytest.importorskip("peft")

OURO = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def ouro(dtype=torch.float64):
    return OuroLoop(OuroFamily().load(str(checkpoint()), dtype))


def looped(dtype=torch.float64, **fields):
    torch.manual_seed(0)
    config = LoopedConfig(40, 16, d_model=16, n_heads=2, d_ff=32, n_layers=2, n_coda=1, **fields)
    return LoopedLoop(LoopedLM(config).to(dtype))


def looped_gpt2(dtype=torch.float64):
    """Its linear maps are transposed ones of transformers."""
    return LoopedDecoderLoop(LoopedDecoderForCausalLM.from_decoder(decoder("gpt2", dtype)))


MADE = {"ouro": ouro, "looped_lm": looped, "looped_gpt2": looped_gpt2}


def adapted(loop, moved=True, **settings):
    """`loop` with adapters of rank 4, moved off their zeros."""
    adapt(loop, LoraConfig(**{"rank": 4, **settings}), torch.float64, 0)
    for i, p in enumerate(trained(loop) if moved else ()):
        p.data = randn(*p.shape, seed=i) / 8
    return loop


def trained(loop):
    return [p for p in loop.model.parameters() if p.requires_grad]


def last_names(names):
    return {name.rpartition(".")[2] for name in names}


# -- which maps


def test_all_linear_is_the_block_and_nothing_else():
    names = target_names(ouro(), ["all-linear"])
    assert last_names(names) == OURO
    assert len(names) == 2 * len(OURO)  # two layers: no head, no exit gate
    names = target_names(looped(), ["all-linear"])
    assert last_names(names) == {"qkv", "out", "up"}
    assert all(name.startswith("block.") for name in names)  # not the coda's
    assert len(names) == 2 * 4


@pytest.mark.parametrize("made", MADE)
def test_what_gets_an_adapter_is_what_was_asked_for(made):
    loop = MADE[made]()
    names = target_names(loop, ["all-linear"])
    adapted(loop)
    assert sorted(adapted_layers(loop.model)) == sorted(names)


def test_a_block_without_linear_maps_is_named():
    loop = ouro()
    loop.model.model.layers = torch.nn.ModuleList([torch.nn.LayerNorm(8)])
    with pytest.raises(ConfigError, match=r"lora.rank: expected a block with linear maps, got one"):
        adapt(loop, LoraConfig(rank=2), torch.float64, 0)


def test_targets_by_name():
    loop = ouro()
    assert last_names(target_names(loop, ["q_proj", "mlp.up_proj"])) == {"q_proj", "up_proj"}
    outs = target_names(looped(), ["attention.f.out"])
    assert outs == ["block.0.attention.f.out", "block.1.attention.f.out"]


@pytest.mark.parametrize("name", ["query", "early_exit_gate", "lm_head", "proj"])
def test_a_target_that_is_not_there_names_those_that_are(name):
    with pytest.raises(ConfigError) as raised:
        adapt(ouro(), LoraConfig(rank=2, targets=("q_proj", name)), torch.float64, 0)
    assert f"got {name}" in str(raised.value)
    assert all(each in str(raised.value) for each in OURO)
    assert "early_exit_gate," not in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 0}, "lora: rank: expected an integer >= 1, got 0"),
        ({"rank": "half"}, "lora.rank: expected int, got 'half'"),
        ({"rank": 4, "alpha": 0}, r"lora: alpha: expected a number in \(0, inf\), got 0"),
        ({"rank": 4, "dropout": 1.0}, r"lora: dropout: expected a number in \[0, 1\), got 1.0"),
        ({"rank": 4, "targets": []}, "lora: targets: expected all-linear or names"),
        (
            {"rank": 4, "targets": "all-linear,q_proj"},
            "lora: targets: expected all-linear or names",
        ),
        ({"targets": "q_proj"}, "lora: rank: expected an integer with targets given .*got None"),
        ({"alpha": 8.0}, "lora: rank: expected an integer with alpha given"),
        ({"rank": 4, "per_turn": True}, "lora: per_turn: expected false, got true: all turns"),
    ],
)
def test_settings_that_do_not_fit(wrong, message):
    with pytest.raises(ConfigError, match=message):
        build(LoraConfig, wrong, "lora")


def test_a_rank_above_that_of_the_maps_is_refused():
    loop = ouro()
    most = loop.model.config.hidden_size
    with pytest.raises(
        ConfigError, match=f"lora.rank: expected at most {most}, .*, got {most + 1}"
    ):
        adapt(loop, LoraConfig(rank=most + 1), torch.float64, 0)
    adapt(loop, LoraConfig(rank=most), torch.float64, 0)


# -- where they begin


@pytest.mark.parametrize("made", MADE)
def test_they_begin_as_the_model_they_adapt(made):
    plain, loop = MADE[made](), adapted(MADE[made](), moved=False)
    h = randn(2, 5, plain.prelude(tokens(1, 2, vocab=40)).shape[-1])
    plain_block, block = looped_block(plain.model), looped_block(loop.model)
    assert torch.equal(block(h), plain_block(h))
    before, after = dict(plain.model.named_parameters()), dict(loop.model.named_parameters())
    assert {name for name, p in after.items() if p.requires_grad} == {
        name for name in after if "lora_" in name
    }
    base = {name.replace(".base_layer", ""): p for name, p in after.items() if "lora_" not in name}
    assert base.keys() == before.keys()
    assert all(torch.equal(base[name], before[name]) for name in before)


def test_a_seed_gives_the_same_adapters_and_leaves_other_draws_alone():
    def drawn(seed):
        torch.manual_seed(5)
        loop = ouro()
        adapt(loop, LoraConfig(rank=4), torch.float32, seed)
        return [p.clone() for p in trained(loop)], torch.rand(1)

    (first, a), (again, b), (other, _) = drawn(1), drawn(1), drawn(2)
    torch.manual_seed(5)
    ouro()
    assert torch.equal(a, torch.rand(1))
    assert torch.equal(a, b)
    assert {p.dtype for p in first} == {torch.float32}
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_alpha_is_a_scale():
    h = randn(1, 5, 32)
    base = looped_block(ouro().model)(h)
    one, four = (
        looped_block(adapted(ouro(), alpha=alpha, targets=("down_proj",)).model)
        for alpha in (None, 16.0)
    )
    # Of the last map alone the output is not linear, so compare with the weight written out.
    loop = ouro()
    for name, layer in adapted_layers(adapted(ouro(), targets=("down_proj",)).model).items():
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        loop.model.get_submodule(name).weight.data += 4 * product
    assert relative_error(four(h), looped_block(loop.model)(h)) <= BLOCK
    assert relative_error(one(h), base) > 1e-3


# -- as a pair


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_looped_lm_with_adapters_is_the_jvp_of_itself(dropout):
    loop = adapted(looped(), dropout=dropout)
    loop.train()
    block = loop.model.block

    def f(h):
        torch.manual_seed(3)  # the same masks in each call
        return block(h)

    def run(stack):
        out = f(Dual(stack))
        return torch.stack((out.primal, out.tangent))

    h, v = randn(2, 5, 16).requires_grad_(), randn(2, 5, 16, seed=1).requires_grad_()
    if dropout:
        assert relative_error(f(h), loop.eval() and block(h)) > 1e-2
        loop.train()
    assert_dual_matches(run, f, h, v, [h, v, *trained(loop)])
    assert explain(block, h.detach()).fallbacks == []


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_ouro_with_adapters_against_differences(dropout):
    loop = adapted(ouro(), dropout=dropout)
    loop.train()
    block = looped_block(loop.model)

    def f(h):
        torch.manual_seed(3)
        return block(h)

    h = randn(1, 5, 32)
    assert_matches_differences(f, h, trained(loop)[:14])
    assert explain(block, h).fallbacks == []


def test_the_penalty_of_ouro_with_adapters_is_that_of_the_weights_written_out():
    """Value and gradient in every adapter, by torch.func.jvp of Ouro read from its description."""
    loop = adapted(ouro(), alpha=2.0)
    fields = json.loads((checkpoint() / "config.json").read_text())
    state = {name: p for name, p in loop.model.named_parameters() if "lora_" not in name}
    weights = {name.replace(".base_layer", ""): p.detach() for name, p in state.items()}
    for name, layer in adapted_layers(loop.model).items():
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + 0.5 * product
    places = torch.arange(5)

    def turn(h):
        for i in range(2):
            own = ouro_reference._under(weights, f"model.layers.{i}.")
            h = ouro_reference._layer(own, fields, i, h, places)
        return ouro_reference._norm(h, weights["model.norm.weight"], fields)

    h, v = randn(1, 5, 32), randn(1, 5, 32, seed=1)
    _, jv = torch.func.jvp(turn, (h[0],), (v[0] / v.norm(),))
    expected = jv.square().sum()
    found = fused_jsrr(looped_block(loop.model), h, v=v)
    assert relative_error(found, expected) <= BLOCK
    leaves = trained(loop)
    assert len(leaves) == 28
    mine, theirs = (torch.autograd.grad(each, leaves) for each in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        assert relative_error(a, b) <= BLOCK


# -- merged


@pytest.mark.parametrize("made", MADE)
@torch.no_grad()
def test_merged_is_unmerged(made):
    loop = adapted(MADE[made]()).eval()
    ids = tokens(2, 7, vocab=40)
    before = loop.model(ids, turns=3)
    plain = MADE[made]()
    names = [name for name, _ in plain.model.named_parameters()]
    assert merge(loop.model) is loop.model
    assert [name for name, _ in loop.model.named_parameters()] == names
    assert not hasattr(loop.model, "peft_config")
    after, base = loop.model(ids, turns=3), plain.model(ids, turns=3)
    a, b, c = (x if isinstance(x, torch.Tensor) else x.logits for x in (after, before, base))
    assert relative_error(a, b) <= BLOCK
    assert relative_error(a, c) > 1e-3


@pytest.mark.parametrize(("size", "low", "high"), [(1.0, 0.999, 1.001), (1e-3, 0.0, 0.6)])
def test_what_is_left_of_adapters_in_bf16_is_known(size, low, high):
    """Weights of about 1/6 are 2^-10 apart in bf16; rounding to the nearest keeps most of what is
    far larger and loses what is far smaller."""
    loop = adapted(ouro(torch.bfloat16))
    loop.model.double()
    for layer in adapted_layers(loop.model).values():
        layer.scaling["default"] = size
    share = kept_share(loop.model, torch.bfloat16)
    assert low <= share <= high
    assert kept_share(loop.model, torch.float64) == pytest.approx(1.0, abs=1e-9)
    before = {name: each.weight.clone() for name, each in adapted_layers(loop.model).items()}
    merge(loop.model).bfloat16().double()
    moved = [loop.model.get_submodule(name).weight - w for name, w in before.items()]
    assert any(each.norm() > 0 for each in moved)
    assert kept_share(loop.model, torch.bfloat16) == 1.0  # none any more


def test_a_model_without_adapters_is_left_as_it_is():
    loop = ouro()
    before = [p.clone() for p in loop.model.parameters()]
    merge(loop.model)
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fingerprint_is_of_the_frozen_weights_to_the_last_bit(dtype):
    loop, other = (adapted(ouro(dtype), moved=False) for _ in range(2))
    before = fingerprint(loop.model)
    trained(loop)[0].data += 1
    assert fingerprint(loop.model) == before == fingerprint(other.model)
    weight = other.model.lm_head.weight.data
    weight[0, 0] = torch.nextafter(weight[0, 0], weight.new_tensor(9.0))
    assert fingerprint(other.model) != before


# -- folders


@torch.no_grad()
def test_peft_reads_what_is_written(tmp_path):
    loop = adapted(ouro(), alpha=3.0).eval()
    write_adapter(loop.model, tmp_path / "adapter", str(checkpoint()), True)
    read = peft.PeftModel.from_pretrained(ouro().model, tmp_path / "adapter").eval()
    ids = tokens(2, 7)
    expected = loop.model(ids, turns=3).logits
    assert torch.equal(read(input_ids=ids, turns=3).logits, expected)
    again = ouro().model
    load_adapter(tmp_path / "adapter", again)
    assert torch.equal(again(ids, turns=3).logits, expected)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == OURO
    assert config["base_model_name_or_path"] == str(checkpoint())


@torch.no_grad()
def test_names_that_mean_more_than_the_block_are_written_in_full(tmp_path):
    loop = adapted(looped())  # the coda has maps of the same names
    write_adapter(loop.model, tmp_path / "adapter", "base", False)
    again = looped().model
    load_adapter(tmp_path / "adapter", again)
    ids = tokens(2, 7, vocab=40)
    assert torch.equal(again(ids, turns=2), loop.model(ids, turns=2))


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"use_rslora": True}, {}], ids=str)
@torch.no_grad()
def test_what_peft_writes_is_read_and_merged(tmp_path, kind):
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], **kind)
    theirs = peft.get_peft_model(ouro().model, config)
    for i, (name, p) in enumerate(theirs.named_parameters()):
        if "lora_A" in name or "lora_B" in name:
            p.data = randn(*p.shape, seed=i) / 8
    theirs.save_pretrained(tmp_path / "adapter")
    ids = tokens(2, 7)
    expected = theirs.eval()(input_ids=ids, turns=2).logits
    model = ouro().model
    load_adapter(tmp_path / "adapter", model)
    model.double()
    assert relative_error(model(ids, turns=2).logits, expected) <= BLOCK
    assert relative_error(merge(model)(ids, turns=2).logits, expected) <= BLOCK


def test_a_bias_that_can_not_be_merged_is_named():
    model = ouro().model
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True)
    peft.inject_adapter_in_model(config, model, "default")
    with pytest.raises(ValueError, match=r"adapter: can't be merged into model.*lora_bias"):
        merge(model)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_tokens_trained_beside_adapters_are_exported(tmp_path, tied):
    base = checkpoint(tie_word_embeddings=tied)
    config = peft.LoraConfig(
        r=3, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [4, 9]}
    )
    theirs = peft.get_peft_model(OuroForCausalLM.from_pretrained(base), config)
    for i, (name, p) in enumerate(theirs.named_parameters()):
        if "lora_" in name or "trainable_tokens" in name:
            p.data = randn(*p.shape, seed=i).to(p)
    theirs.save_pretrained(tmp_path / "adapter")
    export_run(tmp_path / "adapter", tmp_path / "whole")
    made = OuroForCausalLM.from_pretrained(tmp_path / "whole").eval()
    ids = torch.tensor([[4, 7, 9, 4, 2]])
    expected = theirs.eval()(input_ids=ids, turns=2).logits
    assert relative_error(made(ids, turns=2).logits, expected) <= 1e-5


def test_what_an_adapter_may_not_ask_for(tmp_path):
    write_adapter(adapted(ouro()).model, tmp_path, "someone/base", True)
    file = tmp_path / "adapter_config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"layer_replication": [[0, 2], [0, 2]]}))
    with pytest.raises(ValueError, match=r"or more layers, got .*layer_replication ..0, 2"):
        load_adapter(tmp_path, ouro().model)
    for asked in ({"modules_to_save": ["lm_head"]}, {"alora_invocation_tokens": [5]}):
        file.write_text(json.dumps(written | asked))
        ((name, value),) = asked.items()
        with pytest.raises(ValueError, match=re.escape(f"got LORA, {name} {value}")):
            load_adapter(tmp_path, ouro().model)
    file.write_text(json.dumps(written | {"revision": "v2"}))
    with pytest.raises(ValueError, match="revision: expected null or main, got 'v2'"):
        adapter_base(tmp_path)
    file.write_text(json.dumps(written | {"revision": "main"}))
    assert adapter_base(tmp_path) == "someone/base"


def test_adapters_that_can_not_be_read(tmp_path):
    loop = adapted(ouro())
    write_adapter(loop.model, tmp_path / "adapter", "base", True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    wider = copy.deepcopy(config) | {"r": 5}
    fewer = copy.deepcopy(config) | {"target_modules": ["q_proj"]}
    for changed, message in ((wider, "does not fit its base: .*size"), (fewer, "24 are not exp")):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            load_adapter(tmp_path / "adapter", ouro().model)
    other = peft.get_peft_model(ouro().model, peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"],
    ))  # fmt: skip
    other.save_pretrained(tmp_path / "ia3")
    with pytest.raises(ValueError, match=r"expected a LoRA adapter .*got IA3"):
        load_adapter(tmp_path / "ia3", ouro().model)


def test_an_adapter_without_whole_weights_is_named(tmp_path):
    write_adapter(adapted(ouro()).model, tmp_path / "adapter", "base", True)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"adapter: its adapter's weights can't be read: .*header"):
        load_adapter(tmp_path / "adapter", ouro().model)
    weights.unlink()
    with pytest.raises(ValueError, match=r"adapter: expected adapter_model.safetensors beside"):
        load_adapter(tmp_path / "adapter", ouro().model)
