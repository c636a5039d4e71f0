"""Docstrings in one dialect: a noun or an imperative first, and errors in a block."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in ("stars_fast", "studies", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)


def strings_of(path):
    """Docstrings of modules, classes, functions, and those below names: the line and the text."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if is_text and isinstance(child.value.value, str):
                yield child.lineno, child.value.value


def faults(text):
    if text.startswith(("What ", "Of ")):
        yield "begins with a question word or a genitive"
    if re.search(r"\bRaises [A-Z]\w+", text):
        yield "errors in prose: they want a block Raises:"


@pytest.mark.parametrize("folder", ["stars_fast", "studies", "benchmarks"])
def test_docstrings_have_one_dialect(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == folder
        for line, text in strings_of(path)
        for fault in faults(text)
    ]
    assert not found, "\n".join(found)


def test_faults_are_found():
    assert list(faults("What it does.")) == ["begins with a question word or a genitive"]
    assert list(faults("A map. Raises ValueError if it is none."))
    assert not list(faults("A map.\n\n    Raises:\n        ValueError: it is none.\n"))
