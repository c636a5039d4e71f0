"""The package as a user meets it: import cost, the README's claims, the layout it shows."""

import re
import shlex
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def python(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout


def bash(page):
    return [text.replace("\\\n", " ") for text in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_import_is_fast_and_lean():
    heavy = ("torch", "transformers", "datasets", "lm_eval", "matplotlib", "scipy")
    start = time.perf_counter()
    loaded = python(f"import sys, stars_fast; print([m for m in {heavy} if m in sys.modules])")
    assert time.perf_counter() - start < 2
    assert loaded.strip() == "[]"


def test_the_core_needs_neither_transformers_nor_matplotlib():
    code = (
        "import sys, torch, stars_fast\n"
        "stars_fast.fused_jsrr(torch.nn.Linear(4, 4), torch.randn(2, 3, 4)).backward()\n"
        "print([m for m in ('transformers', 'datasets', 'matplotlib', 'yaml') if m in sys.modules])"
    )
    assert python(code).strip() == "[]"


@pytest.mark.slow
def test_the_auto_classes_know_ouro_once_its_package_is_imported(tmp_path):
    pytest.importorskip("transformers")
    alone = f"""
import sys, stars_fast
assert "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
except ValueError as error:
    print("`ouro` but Transformers does not recognize" in str(error))
import stars_fast.models.ouro
from transformers import AutoConfig, AutoModel
print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__module__)
print(type(AutoModel.from_pretrained({str(tmp_path)!r})).__module__)
print(type(AutoConfig.from_pretrained({str(tmp_path)!r})).__module__)
"""

    from stars_fast.models.ouro.tiny import write_tiny_ouro

    write_tiny_ouro(tmp_path, remote_code=False)
    assert python(alone).split() == [
        "True",
        "stars_fast.models.ouro.causal_lm",
        "stars_fast.models.ouro.model",
        "stars_fast.models.ouro.config",
    ]
    for page in ("ouro", "transformers"):
        guide = ROOT / "docs" / "guides" / f"{page}.md"
        assert "import stars_fast.models.ouro" in guide.read_text()


def test_public_names_are_there_and_documented():
    import stars_fast

    for name in stars_fast.__all__:
        value = getattr(stars_fast, name)
        assert name == "__version__" or value.__doc__
    assert set(stars_fast.__all__) <= set(dir(stars_fast))
    with pytest.raises(AttributeError, match="no attribute 'fast_jsrr'"):
        stars_fast.fast_jsrr  # noqa: B018


def test_readme_has_exactly_two_commands_for_a_fresh_machine():
    marked = re.findall(r"<!-- command: (\w+) -->\n```bash\n(.*?)\n```", README, re.DOTALL)
    assert [name for name, _ in marked] == ["job", "tests"]
    for _, command in marked:
        assert command.count("\n") == 0
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")


def test_readme_python_runs():
    block, h = torch.nn.Linear(8, 8), torch.randn(2, 3, 8)
    for code in blocks("python"):
        names = {"torch": torch, "block": block, "h": h}
        exec(code, names)
        assert names["loss"].requires_grad


def test_readme_fits_a_few_screens_and_says_what_it_is_first():
    assert len(README.splitlines()) <= 120
    first = README.partition("## ")[0]
    for word in ("looped", "turn", "STARS", "JSRR", "arxiv.org/abs/2605.26733", "!["):
        assert word in first


def test_the_tree_that_contributing_shows_is_the_one_on_disk():
    shown_trees = re.findall(r"```text\n(.*?)```", CONTRIBUTING, re.DOTALL)
    (tree,) = [block for block in shown_trees if "stars_fast/" in block]
    folder, shown = ROOT, set()
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
            assert folder.exists(), f"CONTRIBUTING shows {name}"
        else:
            assert (folder / name).exists(), f"CONTRIBUTING shows {name} in {folder.name}"
            shown.add(name.rstrip("/"))
    modules = {path.name for path in (ROOT / "stars_fast").iterdir()}
    modules = {name for name in modules if not name.endswith(".so")}
    assert modules - shown <= {"__init__.py", "__pycache__", "py.typed"}


def test_readme_has_no_gaps():
    assert not re.findall(r"\b(?!STARS_FAST)[A-Z]+_[A-Z_]+\b", README)
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_who_cites_it_cites_this_version():
    yaml = pytest.importorskip("yaml")
    from stars_fast import __version__

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == __version__


def test_readme_commands_are_understood():
    from stars_fast.cli import _EXAMPLES, _OWN_OPTIONS
    from stars_fast.training.config import load_config
    from stars_fast.training.recipes import recipe_names

    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    text = "\n".join([*blocks("bash"), *(each for page in pages for each in bash(page)), _EXAMPLES])
    shown = re.findall(r"(?:stars-fast|-m stars_fast) ([\w-]+) ?([^#\n]*)", text)
    assert len(shown) > 8
    of_a_clone = re.findall(r"python -m (benchmarks|studies) ([^#\n]*)", text)
    assert len(of_a_clone) > 2
    for module, rest in of_a_clone:
        import_module(f"{module}.__main__").options_of(shlex.split(rest))
    for command, rest in shown:
        rest = rest.replace("--resume auto", "--resume")
        assert command in ("train", "export", "recipes", "completion", *_OWN_OPTIONS)
        if command == "completion":  # inside of quotes
            continue
        words = [word for word in shlex.split(rest) if word not in ("--resume", "--dry-run")]
        if {"--help", "--help-all"} & set(words):
            continue
        if command in ("eval", "analyze"):
            import_module(f"stars_fast.commands.{command}").options_of(words)
        if command == "train" and not words[0].startswith("runs/"):
            assert words[0] in recipe_names()
            load_config(words[0], words[1:])
