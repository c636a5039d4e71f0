"""One tree of dataclasses from plain mappings: typed, with errors that name the field.

A section of the tree is a dataclass beside its owner; this file knows none of them. It builds
them from what YAML or the command line gives, lists their fields for the help text, and turns
them back into plain mappings.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stars_fast.base.errors import ConfigError


class Field(NamedTuple):
    """One leaf of the tree: its type, its default (`REQUIRED` if it has none) and its meaning."""

    type: Any
    default: Any
    help: str


REQUIRED = object()

_YAML_WORDS = ((True, "on"), (False, "off"), (None, "none"))
"""Values for which YAML 1.1 takes words that are choices: on and yes, off and no, null and ~."""


def build(cls: type, mapping: Any, where: str = "") -> Any:
    """An instance of the dataclass `cls` from `mapping`, its sections built the same way.

    Values are converted to the types of the annotations; text is read as the command line gives
    it ("1e-3", "true", "none", "1,2,4"). `where` is the dotted path of `cls` in the tree, for
    messages.

    Raises:
        ConfigError: an unknown key (with the nearest name), a missing one, a value of the wrong
            type, and whatever the dataclass itself refuses.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where or 'the recipe'}: expected a mapping, got {mapping!r}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in mapping:
        if key not in fields:
            raise ConfigError(unknown(_join(where, str(key)), [_join(where, n) for n in fields]))
    values = {}
    for name, field in fields.items():
        path = _join(where, name)
        if name in mapping:
            values[name] = _convert(hints[name], mapping[name], path)
        elif _default(field) is REQUIRED:
            raise ConfigError(f"{path} is missing and has no default")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error


def to_dict(config: Any) -> dict[str, Any]:
    """The tree as nested mappings of plain values (tuples as lists), in the order of its fields."""
    return {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.init
    }


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` in their places, mappings merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        merged[key] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def leaves(cls: type, where: str = "") -> dict[str, Field]:
    """Every leaf field below the dataclass `cls` by dotted path, in order.

    The meaning comes from the docstring of the dataclass or of those it extends, where `name: text`
    (or `name, other: text`) documents a field up to the next documented one or an empty line.
    """
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    docs = [base.__doc__ or "" for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    helps = _field_helps("\n\n".join(docs), [field.name for field in fields])
    found: dict[str, Field] = {}
    for field in fields:
        path = _join(where, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            found |= leaves(hints[field.name], path)
        else:
            found[path] = Field(hints[field.name], _default(field), helps.get(field.name, ""))
    return found


def flat_mapping(mapping: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping of dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        path = _join(where, key)
        flat |= flat_mapping(value, path) if isinstance(value, Mapping) else {path: value}
    return flat


def is_none(value: Any) -> bool:
    """Whether a value stands for none, as a field that may be none reads it."""
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


def unknown(name: str, known: Iterable[str]) -> str:
    """A message that `name` is not one of `known`, with the nearest of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "known: " + ", ".join(sorted(known))
    return f"unknown field {name}; {hint}"


def type_name(hint: Any) -> str:
    """The annotation `hint` as a reader writes it: int, float|none, list of int, cosine|wsd."""
    if _is_union(hint):
        return "|".join(type_name(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(typing.get_args(hint))
    if typing.get_origin(hint) in (tuple, list):
        return f"list of {type_name(typing.get_args(hint)[0])}"
    return "none" if hint is type(None) else hint.__name__


def _convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the annotation `hint` wants it."""
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    if _is_union(hint):
        if is_none(value):
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
        return _convert(hint, value, path)
    if typing.get_origin(hint) is typing.Literal:
        for read, word in _YAML_WORDS:
            if value is read and word in typing.get_args(hint):
                return word
        if value in typing.get_args(hint):
            return value
        raise ConfigError(f"{path}: expected one of {type_name(hint)}, got {value!r}")
    if typing.get_origin(hint) in (tuple, list):
        if is_none(value.strip() if isinstance(value, str) else value):
            value = []
        elif isinstance(value, str):
            value = [part for part in value.strip("[]() ").split(",") if part.strip()]
        if isinstance(value, list | tuple):
            item = typing.get_args(hint)[0]
            return typing.get_origin(hint)(_convert(item, part, path) for part in value)
    elif (converted := _scalar(hint, value)) is not None:
        return converted
    raise ConfigError(f"{path}: expected {type_name(hint)}, got {value!r}")


def _scalar(hint: type, value: Any) -> Any:
    """`value` as a `hint` (bool, int, float or str), or None if it is not one."""
    if hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        return words.get(value.lower()) if isinstance(value, str) else _only(value, bool)
    if hint is str:
        return _only(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        digits = isinstance(value, str) and value.strip().lstrip("+-").isdecimal()
        if hint is int and (digits or isinstance(value, int)):  # a float would round large ones
            return int(value)
        number = float(value)
        if not math.isfinite(number):
            return None
        if hint is int:
            return int(number) if number.is_integer() else None
    except (ValueError, OverflowError):
        return None
    return number


def _only(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    return list(value) if isinstance(value, tuple) else value


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def _field_helps(doc: str, names: list[str]) -> dict[str, str]:
    """The sentences of a docstring on each of `names`, on one line each."""
    one = "|".join(map(re.escape, names))
    pattern = re.compile(rf"(?:^|(?<=\s))((?:{one})(?:, (?:{one}))*):\s")
    helps: dict[str, str] = {}
    for paragraph in re.split(r"\n\s*\n", doc):
        found = list(pattern.finditer(paragraph))
        ends = [match.start() for match in found[1:]] + [len(paragraph)]
        for match, end in zip(found, ends, strict=False):
            text = " ".join(paragraph[match.end() : end].split())
            helps |= dict.fromkeys(match.group(1).split(", "), text)
    return helps


def _is_union(hint: Any) -> bool:
    """True for `X | None`, the only union that a configuration has."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
