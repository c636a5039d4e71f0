"""The package as a user meets it: import cost, the README's claims, the layout it shows."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def python(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout


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
    examples = blocks("python")
    assert examples
    for code in examples:
        python("import torch\nblock, h = torch.nn.Linear(8, 8), torch.randn(2, 3, 8)\n" + code)


def test_readme_tree_is_on_disk():
    (tree,) = [block for block in blocks("text") if "stars_fast/" in block]
    folder = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        folder = ROOT if not line.startswith(" ") else folder
        path = folder / name
        assert path.exists(), f"README shows {name}"
        if not line.startswith(" ") and name.endswith("/"):
            folder = path


def test_readme_commands_exist():
    from stars_fast.training.recipes import recipe_names

    shown = re.findall(r"stars-fast (\w+)(?: ([\w-]+))?", "\n".join(blocks("bash")))
    assert shown
    for command, argument in shown:
        assert command in ("train", "eval", "recipes")
        if command == "train" and not argument.startswith("runs"):
            assert argument in recipe_names()
