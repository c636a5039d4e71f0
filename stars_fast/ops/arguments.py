"""Checks of arguments that the ops share."""

from __future__ import annotations

from torch import Tensor


def check_stack(op: str, name: str, x: Tensor, dual: bool = True) -> None:
    """Raise unless `x` is floating point and, with `dual`, a stack [2, ...].

    Raises:
        TypeError: another dtype.
        ValueError: another shape.
    """
    if not x.is_floating_point():
        raise TypeError(f"{op}: {name}: expected floating point, got {x.dtype}")
    if dual and (x.dim() == 0 or x.shape[0] != 2):
        raise ValueError(f"{op}: {name}: expected a stack [2, ...], got {list(x.shape)}")


def check_parameter(op: str, name: str, parameter: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless `parameter` is None or [D], for x [..., D]."""
    if parameter is not None and parameter.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name}: expected shape {list(x.shape[-1:])}, got {list(parameter.shape)}"
        )
