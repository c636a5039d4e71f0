"""Checks of settings that several configurations share."""


def check_integer(name: str, value: int, low: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
