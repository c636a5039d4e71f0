"""Without a library that an extra brings, everything that needs it says which extra that is."""

import json
import os
import subprocess
import sys

import pytest

from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import MissingPackageError, explained, need

# Run with a module that can't be imported: what each command and entry point ends with.
SCRIPT = """
import contextlib, importlib, io, json, sys
blocked, *asked = sys.argv[1:]
sys.modules[blocked] = None

def run(words):
    from stars_fast.cli import main
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code = main(words.split())
        except SystemExit as exit:
            code = exit.code
    return code, said.getvalue()

def load(name):
    try:
        importlib.import_module(name)
    except ImportError as error:
        return type(error).__name__, str(error)
    return None, ""

found = {each: run(each) if " " in each else load(each) for each in asked}
print(json.dumps(found))
"""

OURO = "stars_fast.models.ouro"
NEEDED = {
    "transformers": (
        "ouro",
        [
            "export model out",
            "eval model --text a.txt --out out",
            "eval model --tasks gsm8k --out out",
            "analyze model --text a.txt",
            "train ouro-tiny --steps 1 --report_to none",
            "bench step",
            OURO,
        ],
    ),
    "lm_eval": (
        "eval",
        [
            "eval model --tasks gsm8k --out out",
            "lm-eval ls tasks",
            "stars_fast.evaluation.lm_model",
            "train ouro-tiny --eval.tasks gsm8k --report_to none",
        ],
    ),
    "matplotlib": ("train", ["analyze model --text a.txt", "eval model --text a.txt --out out"]),
    "yaml": ("train", ["train addition-quick", "recipes ", "study norms", "eval run"]),
    "datasets": (
        "ouro",
        [
            "train ouro-tiny --steps 1 --report_to none",
            "eval model --text a.jsonl --out out",
            "analyze model --text a.jsonl",
        ],
    ),
    "torchao": (
        "rounding",
        [
            "train addition-quick --precision bfloat16 --stochastic_rounding true --steps 1 "
            "--report_to none"
        ],
    ),
    "peft": (
        "lora",
        [
            "train ouro-tiny-lora --steps 1 --report_to none",
            "eval adapter --text a.txt --out out",
            "analyze adapter --text a.txt",
            "export adapter merged",
        ],
    ),
    "jinja2": ("train", ["train ouro-tiny --steps 1 --report_to none"]),
}
"""By module: its extra, commands (with a space) and modules that need it."""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    pytest.importorskip("transformers")
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    folder = tmp_path_factory.mktemp("optional")
    write_tiny_ouro(folder / "model")
    (folder / "a.txt").write_text("one and two\n\nthree and four\n")
    (folder / "a.jsonl").write_text('{"text": "one and two"}\n')
    (folder / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "model"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("method: sft\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("module", NEEDED)
def test_everything_that_needs_a_package_names_its_extra(here, module):
    extra, asked = NEEDED[module]
    command = [sys.executable, "-c", SCRIPT, module, *asked]
    new = os.environ | {"STARS_FAST_CACHE": str(here / f"tokens-{module}")}  # no tokens of before
    done = subprocess.run(command, env=new, capture_output=True, text=True, cwd=here, check=False)
    assert done.returncode == 0, done.stderr
    package = {"lm_eval": "lm-eval", "yaml": "pyyaml"}.get(module, module)
    for each, (code, said) in json.loads(done.stdout.splitlines()[-1]).items():
        assert code == (2 if " " in each else "MissingPackageError"), (each, said)
        assert package in said, (each, said)
        assert f'pip install "stars-fast[{extra}]"' in said, (each, said)
        assert "Traceback" not in said


def test_what_is_missing_can_be_caught_as_either():
    with pytest.raises(ImportError, match="chats need nothing_here: pip install nothing_here"):
        need("nothing_here.at_all", "chats")
    assert issubclass(MissingPackageError, ConfigError)


def test_only_what_an_extra_brings_is_explained():
    error = explained(ModuleNotFoundError("no", name="datasets.arrow"), "stars-fast train")
    assert str(error) == ('stars-fast train needs datasets: pip install "stars-fast[ouro]" (no)')
    assert error.name == "datasets"
    assert explained(ModuleNotFoundError("no", name="stars_fast.nothing"), "x") is None
    assert explained(ImportError("no"), "x") is None
