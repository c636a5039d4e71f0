"""Checks of settings that several configurations share."""


def check_integer(name: str, value: int, low: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")


def check_number(
    name: str, value: float, low: float, high: float = float("inf"), open_low: bool = False
) -> None:
    """Raise ValueError unless `value` is a finite number in [low, high], (low, high] with
    `open_low`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    inside = number and low <= value <= high and value < float("inf")
    if not inside or (open_low and value == low):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{']' if high < float('inf') else ')'}"
        raise ValueError(f"{name} must be a number in {bounds}, got {value!r}")
