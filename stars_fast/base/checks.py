"""Checks of settings that several configurations share."""

import dataclasses
import math
import typing
from numbers import Integral, Real
from typing import Any

_KINDS: dict[type, tuple[str, Any]] = {
    bool: ("true or false", bool),
    int: ("an integer", Integral),
    float: ("a number", Real),
    str: ("text", str),
}


def check_types(settings: Any) -> None:
    """Raise TypeError for a field of a dataclass that is not of the bool, int, float or str that
    its annotation says, and ValueError for a number that is not finite; others are left alone."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        if hints[field.name] in _KINDS:
            check_kind(field.name, getattr(settings, field.name), hints[field.name])


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless `value` is of `kind`, one of bool, int, float and str (a bool is no
    number), and ValueError for a number that is not finite."""
    wanted, types = _KINDS[kind]
    if not isinstance(value, types) or (kind is not bool and isinstance(value, bool)):
        raise TypeError(f"{name}: expected {wanted}, got {value!r}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")


def check_integer(name: str, value: int, low: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}: expected an integer >= {low}, got {value!r}")


def check_number(
    name: str, value: float, low: float, high: float = float("inf"), open_low: bool = False
) -> None:
    """Raise ValueError unless `value` is a finite number in [low, high], (low, high] with
    `open_low`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    inside = number and low <= value <= high and value < float("inf")
    if not inside or (open_low and value == low):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{']' if high < float('inf') else ')'}"
        raise ValueError(f"{name}: expected a number in {bounds}, got {value!r}")
