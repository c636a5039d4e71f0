"""Sums, means and what is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.forward_ad import jvp
from stars_fast.dual.registry import add_rule
from stars_fast.dual.rule import rule
from stars_fast.dual.rules.shapes import shift
from stars_fast.dual.tensor import Dual
from stars_fast.ops.precision import widen


def _dims(input: Dual, dim: Any) -> tuple[int, ...]:
    """Dimensions of the stack; all but the pair when `dim` is None or empty."""
    if dim is None or dim == () or dim == []:
        return tuple(range(1, input.stack.dim()))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(shift(each, input.stack) for each in dims)


def _reduce(func: Any, input: Dual, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Dual:
    if input.stack.dim() == 1:
        return Dual(input.stack.to(dtype or input.stack.dtype, copy=True))
    return Dual(func(input.stack, _dims(input, dim), keepdim, dtype=dtype))


@rule("sum", kind="stacked")
def sum_(
    input: Dual, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Dual:
    return _reduce(torch.sum, input, dim, keepdim, dtype)


@rule("mean", kind="stacked")
def mean(
    input: Dual, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Dual:
    return _reduce(torch.mean, input, dim, keepdim, dtype)


def _moments(input: Dual, dim: Any, correction: Any) -> tuple[Tensor, tuple[int, ...]]:
    """sum(x_c^2) and sum(x_c x_dot_c) over n - correction, stacked, with the reduced dimensions
    kept, and those; fp32 for 16 bits."""
    dims = _dims(input, dim)
    stack = widen(input.stack)
    centred = stack - stack.mean(dims, keepdim=True)
    freedom = max(math.prod(stack.shape[each] for each in dims) - correction, 0)
    return (centred * centred[0]).sum(dims, keepdim=True) / freedom, dims


def _variance(input: Dual, dim: Any, correction: Any, keepdim: bool) -> Dual:
    """y = sum(x_c^2) / (n - correction), y_dot = 2 sum(x_c x_dot_c) / (n - correction)."""
    moments, dims = _moments(input, dim, correction)
    result = torch.stack((moments[0], 2 * moments[1])).to(input.stack.dtype)
    return Dual(result if keepdim else result.squeeze(dims))


def _deviation(input: Dual, dim: Any, correction: Any, keepdim: bool) -> Dual:
    """y = sqrt(sum(x_c^2) / (n - correction)), y_dot = sum(x_c x_dot_c) / ((n - correction) y); 0
    where y is 0, as PyTorch's gradient."""
    moments, dims = _moments(input, dim, correction)
    flat = moments[0] == 0
    y = torch.where(flat, 1.0, moments[0]).sqrt()
    result = torch.stack((y, moments[1] / y)).masked_fill(flat, 0.0).to(input.stack.dtype)
    return Dual(result if keepdim else result.squeeze(dims))


def _spread_options(dim: Any, unbiased: Any, correction: Any) -> tuple[Any, Any]:
    """Dimensions and correction of var and std, from the forms that they are called in."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    return dim, correction


def _spread(name: str, of_rows: Callable[..., Dual]) -> Callable[..., Dual]:
    def handler(
        input: Dual,
        dim: Any = None,
        unbiased: Any = None,
        keepdim: bool = False,
        *,
        correction: Any = None,
    ) -> Dual:
        dim, correction = _spread_options(dim, unbiased, correction)
        if input.stack.is_complex():
            options = {"dim": dim, "correction": correction, "keepdim": keepdim}
            return jvp(getattr(torch, name), name, (input,), options)
        if input.stack.dim() == 1:
            options = {"correction": correction, "keepdim": keepdim}
            return jvp(getattr(torch, name), name, (input,), options)
        return of_rows(input, dim, correction, keepdim)

    return handler


def _with_mean(spread: Callable[..., Dual]) -> Callable[..., tuple[Dual, Dual]]:
    def handler(input: Dual, dim: Any = None, *args: Any, **kwargs: Any) -> tuple[Dual, Dual]:
        if isinstance(dim, bool):
            args, dim = (dim, *args), None
        keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
        return spread(input, dim, *args, **kwargs), mean(input, dim, keepdim)

    return handler


def _register_spreads() -> None:
    for name, of_rows in (("var", _variance), ("std", _deviation)):
        handler = _spread(name, of_rows)
        add_rule(name, "product", handler)
        add_rule(f"{name}_mean", "product", _with_mean(handler))


_register_spreads()


@rule("logsumexp", kind="product")
def logsumexp(input: Dual, dim: Any, keepdim: bool = False) -> Tensor:
    """y = log sum(exp x), y_dot = sum(exp(x - y) x_dot); over nothing but -inf, -inf and 0."""
    if input.stack.dim() == 1 or input.stack.is_complex():
        return jvp(torch.logsumexp, "logsumexp", (input, dim, keepdim), {})
    dims = tuple(each - 1 if each > 0 else each for each in _dims(input, dim))
    x, x_dot = widen(input.stack).unbind(0)
    if x.numel() == 0:
        top = x.new_zeros(())
    else:
        top = x.detach().amax(dims, keepdim=True)
        top = torch.where(top.isinf(), 0.0, top)
    shares = torch.exp(x - top)
    total = shares.sum(dims, keepdim=True)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    y = (top + safe.log()).masked_fill(empty, -torch.inf)
    rise = (shares / safe * x_dot).sum(dims, keepdim=True)
    result = Dual(torch.stack((y, rise)).to(input.stack.dtype))
    return result if keepdim else result.squeeze(dims)


@rule("aminmax", kind="product")
def aminmax(input: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Both ends at once; the op itself has no forward derivative in every torch."""
    dims = () if dim is None else dim
    return torch.return_types.aminmax((input.amin(dims, keepdim), input.amax(dims, keepdim)))
