"""Ouro in vLLM without vLLM: the configuration by the entry point, and the portable model as the
backend for transformers makes it (from 0.27 on, which have no Ouro of their own)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ouro_models import checkpoint, model, tokens
from safetensors.torch import load_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stars_fast.models.export import export_run
from stars_fast.models.ouro import OuroConfig
from stars_fast.models.portable import modeling_ouro_portable as portable

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
READ = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads hidden_act rms_norm_eps max_position_embeddings rope_parameters "
    "total_ut_steps tie_word_embeddings"
).split()
"""Fields of its configuration that vllm/model_executor/models/ouro.py of vLLM 0.26.0 reads."""

LOADED = """
import json, sys
from importlib.metadata import EntryPoint

register = EntryPoint(sys.argv[1], sys.argv[2], "vllm.general_plugins").load()
light = [m for m in ("torch", "transformers") if m in sys.modules]
register()
register()  # as often as vLLM likes
from transformers import AutoConfig

after = [m for m in sys.modules if m.startswith("stars_fast.")]
found = []
for folder in sys.argv[4:]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    found.append({
        "before": light,
        "after": after,
        "class": [type(config).__module__, type(config).__name__],
        "auto_map": getattr(config, "auto_map", None),
        "read": {name: getattr(config, name) for name in json.loads(sys.argv[3])},
    })
print(json.dumps(found))
"""


def said(script, *words):
    run = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def configurations(tmp_path_factory):
    """What one process says of two folders, by whether there is code beside their weights."""
    (plugin,) = PROJECT["entry-points"]["vllm.general_plugins"].items()
    place = tmp_path_factory.mktemp("exported")
    folders = [export_run(checkpoint(), place / str(i), portable=bool(i)) for i in range(2)]
    found = said(LOADED, *plugin, json.dumps(READ), *folders)
    return {bool(i): (folders[i], found[i]) for i in range(2)}


@pytest.mark.slow
@pytest.mark.parametrize("with_code", [False, True])
def test_the_entry_point_makes_the_configuration_known(with_code, configurations):
    folder, found = configurations[with_code]
    assert found["before"] == []
    assert found["class"] == [portable.__name__, "OuroConfig"]
    needed = {"models", "models.portable", "models.portable.modeling_ouro_portable"}
    assert {name.removeprefix("stars_fast.") for name in found["after"]} == needed
    native = OuroConfig.from_pretrained(folder)
    assert found["read"] == {name: getattr(native, name) for name in READ}
    # vLLM from 0.27 on finds the model by it (registry.py, _try_resolve_transformers).
    assert (found["auto_map"] is not None) == with_code


@pytest.mark.slow
def test_without_a_transformers_that_serves_nothing_happens():
    (_, value) = next(iter(PROJECT["entry-points"]["vllm.general_plugins"].items()))
    script = """
import json, sys, warnings
from importlib.metadata import EntryPoint

sys.modules["transformers"] = None
register = EntryPoint("stars_fast", sys.argv[1], "vllm.general_plugins").load()
with warnings.catch_warnings(record=True) as heard:
    register()
print(json.dumps([str(each.message) for each in heard]))
"""
    (warning,) = said(script, value)
    assert warning.startswith("stars_fast: Ouro is not known to transformers:")


def test_what_is_known_already_stays():
    from transformers import CONFIG_MAPPING

    from stars_fast.models.portable import register_config

    register_config()
    assert CONFIG_MAPPING["ouro"] is OuroConfig


class Dense(torch.nn.Module):
    """As vLLM's attention of one slot is called: [tokens, heads * width], without a mask."""

    def forward(self, q, k, v, scale):
        q, k, v = (x.unflatten(-1, (-1, 8)).transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.transpose(0, 1).flatten(1)


def by_slot(module, query, key, value, attention_mask, scaling, **_):
    """vLLM's entry in transformers' table (vllm/model_executor/models/transformers/__init__.py of
    0.33.0): one row of all tokens to what was put on the module, and back in two dimensions."""
    assert attention_mask is None
    assert query.shape[0] == 1
    flat = (x.transpose(1, 2).flatten(2)[0] for x in (query, key, value))
    return module.attn(*flat, scaling), None


@pytest.fixture
def vllm_attention(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", by_slot)


def in_vllm(folder, **changes):
    """The body of a folder's model, as vLLM's backend for transformers makes it."""
    config = portable.OuroConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    config._attn_implementation = "vllm"
    portable.OuroModel._from_config(config)  # a throw-away one first
    net = portable.OuroModel._from_config(config, dtype=torch.float64)
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight")
    net.load_state_dict({key.removeprefix("model."): x for key, x in weights.items()})
    return config, net


@torch.no_grad()
def test_vllm_finds_a_slot_for_each_layer_of_each_turn(vllm_attention):
    folder = checkpoint(num_key_value_heads=2)
    config, net = in_vllm(folder, total_ut_steps=3)
    slots = [m for m in net.modules() if isinstance(m, portable.OuroAttentionSlot)]
    assert sorted(slot.layer_idx for slot in slots) == list(range(config.num_hidden_layers))
    assert (config.num_hidden_layers, len(config.layer_types), len(net.layers)) == (6, 6, 2)
    # vLLM reads the layer from the name, which may hold one number (extract_layer_index).
    for name, module in net.named_modules():
        if isinstance(module, portable.OuroAttentionSlot):
            (layer,) = (int(part) for part in name.split(".") if part.isdigit())
            assert module.layer_idx % len(net.layers) == layer
            assert module.scaling == config.head_dim**-0.5
            module.attn = Dense()
    called = []
    for slot in slots:
        slot.register_forward_hook(lambda module, *_: called.append(module.layer_idx))
    ids, positions = tokens(1, 7), torch.arange(7)[None]
    got = net(input_ids=ids, position_ids=positions, use_cache=False, return_dict=False)[0]
    expected = model(num_key_value_heads=2).model(ids, turns=3).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    assert called == list(range(6))


@torch.no_grad()
def test_what_vllm_can_not_do_is_named(vllm_attention):
    _, net = in_vllm(checkpoint(), convergence_tol=0.1)
    with pytest.raises(ValueError, match="tol: expected none in vLLM"):
        net(input_ids=tokens(1, 3), position_ids=torch.arange(3)[None], use_cache=False)
