from dataclasses import dataclass, field
from typing import Literal

import pytest

from stars_fast.base import tree
from stars_fast.base.errors import ConfigError


@dataclass
class Inner:
    """A section.

    count, other: how many
        of them. rate: how fast.
    """

    count: int = 1
    other: int = 2
    rate: float = 0.5
    limit: float | None = None
    on: bool = False
    turns: tuple[int, ...] = (1, 2)
    kind: Literal["slow", "fast"] = "slow"
    switch: Literal["auto", "on", "off", "none"] = "auto"
    switches: tuple[Literal["on", "off"], ...] = ()

    def __post_init__(self):
        if self.count < 0:
            raise ValueError(f"count: expected at least 0, got {self.count}")


@dataclass
class Outer:
    """A tree. name: of it."""

    name: str
    inner: Inner = field(default_factory=Inner)


def test_values_are_read_as_the_command_line_gives_them():
    text = {"count": "3", "rate": "1e-3", "limit": "none", "on": "true", "turns": "1,4,16"}
    assert tree.build(Inner, text) == Inner(3, 2, 1e-3, None, True, (1, 4, 16))


def test_values_are_read_as_yaml_gives_them():
    read = {"count": 3, "rate": 1, "limit": 2, "on": True, "turns": [4]}
    built = tree.build(Inner, read)
    assert built == Inner(3, 2, 1.0, 2.0, True, (4,))
    assert isinstance(built.rate, float)


def test_words_that_yaml_reads_as_other_values_are_the_words():
    """YAML 1.1 reads on, off, yes and no as booleans, and null is none."""
    built = tree.build(Inner, {"switch": False, "switches": [True, False], "turns": None})
    assert built == Inner(turns=(), switch="off", switches=("on", "off"))
    for read, word in ((True, "on"), (None, "none"), ("off", "off")):
        assert tree.build(Inner, {"switch": read}).switch == word
    assert tree.build(Inner, {"turns": " null "}).turns == ()


def test_round_trip():
    outer = Outer("a", Inner(limit=0.25, turns=()))
    assert tree.build(Outer, tree.to_dict(outer)) == outer


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"name": "a", "inner": {"cuont": 1}}, r"inner\.cuont; did you mean inner\.count\?"),
        ({"name": "a", "inner": {"count": 1.5}}, r"inner\.count: expected int, got 1\.5"),
        ({"name": "a", "inner": {"count": True}}, r"inner\.count: expected int, got True"),
        ({"name": "a", "inner": {"on": "maybe"}}, r"inner\.on: expected bool, got 'maybe'"),
        ({"name": "a", "inner": {"limit": "x"}}, r"inner\.limit: expected float, got 'x'"),
        ({"name": "a", "inner": {"turns": "1,x"}}, r"inner\.turns: expected int, got 'x'"),
        (
            {"name": "a", "inner": {"kind": "new"}},
            r"inner\.kind: expected one of slow\|fast, got",
        ),
        ({"name": "a", "inner": {"kind": False}}, r"expected one of slow\|fast, got False"),
        ({"name": "a", "inner": {"switch": 1}}, r"expected one of auto\|on\|off\|none, got 1"),
        ({"name": "a", "inner": {"count": -1}}, r"inner: count: expected at least 0, got -1"),
        ({"name": "a", "inner": 3}, r"inner: expected a mapping, got 3"),
        ({}, r"name is missing"),
    ],
)
def test_errors_name_the_field(mapping, message):
    with pytest.raises(ConfigError, match=message):
        tree.build(Outer, mapping)


def test_meaning_of_a_field_is_read_from_the_docstring():
    found = tree.leaves(Outer)
    assert found["inner.count"].help == found["inner.other"].help == "how many of them."
    assert found["inner.rate"].help == "how fast."
    assert found["name"] == tree.Field(str, tree.REQUIRED, "of it.")


def test_types_read_well():
    names = {path: tree.type_name(leaf.type) for path, leaf in tree.leaves(Outer).items()}
    assert names["inner.limit"] == "float|none"
    assert names["inner.turns"] == "list of int"
    assert names["inner.kind"] == "slow|fast"


def test_merge_goes_key_by_key():
    base = {"a": {"x": 1, "y": 2}, "b": 3}
    assert tree.merge(base, {"a": {"y": 5}, "b": {"z": 1}}) == {
        "a": {"x": 1, "y": 5},
        "b": {"z": 1},
    }
    assert base == {"a": {"x": 1, "y": 2}, "b": 3}
