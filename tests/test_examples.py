"""The examples run, at a few steps; the notebook's code too."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
FEW = {
    "own_block": ({"steps": 4}, "spectral radius"),
    "trainer": ({"steps": 2}, "'penalty'"),
    "trl_lora": ({"steps": 2}, "'penalty'"),
    "loop_llama": ({"steps": 2}, "logits differ by 0.0e+00"),
    "ouro_turns": ({}, "8.00 turns a token"),
    "tiny_recursive": ({"draws": 2, "batch": 4}, "fused_jsrr: "),
    "deq_map": ({"steps": 4}, "iterations to 1e-4"),
}
NEEDS = {
    "trainer": ("transformers", "datasets", "accelerate"),
    "trl_lora": ("trl", "peft"),
    "loop_llama": ("transformers",),
    "ouro_turns": ("transformers",),
}


def test_every_example_is_run_here_and_told_of():
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == set(FEW)
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"`{path.name}`" in page
        assert len(path.read_text().splitlines()) < 80


@pytest.mark.parametrize("name", FEW)
def test_an_example_runs(name, capsys, monkeypatch, tmp_path):
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    arguments, said = FEW[name]
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**arguments)
    assert said in capsys.readouterr().out
