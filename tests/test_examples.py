"""The examples run, at a few steps; the notebook's code too."""

import json
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


def test_the_notebook_is_valid_has_its_figures_and_runs(monkeypatch, tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    book = json.loads((EXAMPLES / "addition.ipynb").read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert {cell["cell_type"] for cell in book["cells"]} == {"markdown", "code"}
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    codes = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in codes for output in cell["outputs"]]
    assert not [each for each in outputs if each["output_type"] == "error"]
    drawn = sum("image/png" in each.get("data", {}) for each in outputs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", plt.close)
    plt.switch_backend("agg")
    names, shows = {}, 0
    for cell in codes[:-1]:  # the last one analyses the runs, which takes longer than the rest
        code = "".join(cell["source"]).replace("STEPS = 1400", "STEPS = 14")
        code = code.replace("LIMIT = 500", "LIMIT = 20")
        shows += code.count("plt.show()")
        exec(compile(code, "addition.ipynb", "exec"), names)
    assert (names["STEPS"], names["LIMIT"]) == (14, 20)
    assert drawn == shows + 1
