"""The package's floors: a module imports from its own floor and from those below, and never in a
circle, whether at its top or inside a function."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import stars_fast

ROOT = Path(stars_fast.__file__).parent
FLOORS = """
base tokens ops dual functional jsrr data models evaluation analysis training integrations commands
cli __main__
""".split()
"""Lowest first."""

DEBTS: set[tuple[str, str]] = set()
"""Edges between floors that lead upward."""


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a file imports, for types too."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full.removeprefix("stars_fast.") in known else node.module
                if target.startswith("stars_fast"):
                    yield target.removeprefix("stars_fast").removeprefix(".")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("stars_fast"):
                    yield alias.name.removeprefix("stars_fast").removeprefix(".")


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    found = {name: set(imports(path, known)) for name, path in known.items()}
    return {n: (targets | packages(n, targets)) - {n} for n, targets in found.items()}


def packages(name: str, targets: set[str]) -> set[str]:
    """Packages whose `__init__` runs when a module is imported before its targets."""
    return {each for t in targets for each in above(t)} - above(name)


def above(name: str) -> set[str]:
    """The packages that a module is in, the whole one aside."""
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def floor(module: str) -> str:
    return module.partition(".")[0]


def upward(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    return {
        (name, target)
        for name, targets in graph.items()
        for target in targets
        if name and target and FLOORS.index(floor(target)) > FLOORS.index(floor(name))
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, each the one before it; empty where there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_every_module_has_a_floor(graph):
    assert {floor(name) for name in graph if name} <= set(FLOORS)


def test_no_import_leads_upward(graph):
    found = upward(graph)
    assert found - DEBTS == set()
    assert DEBTS - found == set(), "mended: take them out of DEBTS"


def test_no_modules_import_each_other(graph):
    assert circle(graph) == []


def test_circles_and_arrows_upward_are_found():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}})) == {"b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert packages("models.x", {"models.ouro.cache", "models.y", "ops.z"}) == {
        "models.ouro",
        "ops",
    }
    assert upward({"ops.x": {"dual.y"}, "dual.y": {"ops.x", "base.z"}}) == {("ops.x", "dual.y")}
