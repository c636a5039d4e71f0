"""YAML and JSON in which a key that comes twice is a mistake, not an order to forget the first."""

from __future__ import annotations

import json
from typing import Any

from stars_fast.base.optional import need


def parse_yaml(text: str) -> Any:
    """Plain values of a YAML text; None for an empty one.

    A key beside a merge (`<<`) that brings the same one is no repetition: it is how YAML overrides.

    Raises:
        ValueError: it is not YAML, a mapping has a key twice (it names the lines of both), or an
            alias stands within its own anchor.
    """
    yaml = need("yaml", "recipes")
    try:
        for root in yaml.compose_all(text, Loader=yaml.SafeLoader):
            _check(root, "", (), set())
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {_told(error)}") from error
    except RecursionError as error:
        raise ValueError("not settings: nested too deeply") from error


def parse_json(text: str) -> Any:
    """Plain values of a JSON text.

    Raises:
        ValueError: it is not JSON, or an object has a key twice.
    """
    return json.loads(text, object_pairs_hook=_object)


def _check(node: Any, where: str, above: tuple[int, ...], checked: set[int]) -> None:
    """Raise ValueError for a key that comes twice in `node` or below.

    Args:
        node: of PyYAML, or None.
        where: its dotted path.
        above: the nodes that it lies in.
        checked: nodes that need no other look, as aliases stand for them too.
    """
    if node is None or isinstance(node.value, str) or id(node) in checked:
        return
    if id(node) in above:
        raise ValueError(f"line {_line(node)}: {where} holds itself, by an alias of its own anchor")
    above = (*above, id(node))
    first: dict[tuple[str, str], Any] = {}
    for item in node.value:
        if not isinstance(item, tuple):  # of a sequence
            _check(item, where, above, checked)
            continue
        key, value = item
        name = f"{where}.{key.value}" if where else str(key.value)
        if isinstance(key.value, str):
            before = first.setdefault((key.tag, key.value), key)
            if before is not key:
                raise ValueError(
                    f"{name} is there twice, in line {_line(before)} and in line {_line(key)}"
                )
        _check(value, name, above, checked)
    checked.add(id(node))


def _told(error: Any) -> str:
    """An error of PyYAML in a line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"{error.problem} in line {mark.line + 1}"


def _line(node: Any) -> int:
    return node.start_mark.line + 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is there twice")
        found[key] = value
    return found
