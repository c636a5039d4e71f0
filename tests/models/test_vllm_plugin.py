"""Ouro's configuration as vLLM comes to know it: the entry point, and what it makes of a folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ouro_models import checkpoint

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

config = AutoConfig.from_pretrained(sys.argv[3], trust_remote_code=False)
print(json.dumps({
    "before": light,
    "after": [m for m in sys.modules if m.startswith("stars_fast.")],
    "class": [type(config).__module__, type(config).__name__],
    "auto_map": getattr(config, "auto_map", None),
    "read": {name: getattr(config, name) for name in json.loads(sys.argv[4])},
}))
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


@pytest.mark.slow
@pytest.mark.parametrize("with_code", [False, True])
def test_the_entry_point_makes_the_configuration_known(with_code, tmp_path):
    (plugin,) = PROJECT["entry-points"]["vllm.general_plugins"].items()
    folder = export_run(checkpoint(), tmp_path / "out", portable=with_code)
    found = said(LOADED, *plugin, folder, json.dumps(READ))
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
