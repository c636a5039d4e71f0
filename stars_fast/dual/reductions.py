"""Sums, means and what is made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.oneop import jvp
from stars_fast.dual.registry import rule
from stars_fast.dual.structural import shift
from stars_fast.dual.tensor import Dual


def _dims(input: Dual, dim: Any) -> tuple[int, ...]:
    """Dimensions of the stack; all but the pair when `dim` is None or empty."""
    if dim is None or dim == () or dim == []:
        return tuple(range(1, input.stack.dim()))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(shift(each, input.stack) for each in dims)


def _reduce(func: Any, input: Dual, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Dual:
    if input.stack.dim() == 1:
        return Dual(input.stack.to(dtype or input.stack.dtype))
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


def _variance(input: Dual, dim: Any, correction: Any, keepdim: bool) -> Dual:
    """y = sum(x_c^2) / (n - correction), y_dot = 2 sum(x_c x_dot_c) / (n - correction)."""
    dims = _dims(input, dim)
    centred = input.stack - input.stack.mean(dims, keepdim=True)
    count = 1
    for each in dims:
        count *= input.stack.shape[each]
    halves = torch.stack((centred[0], 2 * centred[1])) * centred[0]
    return Dual(halves.sum(dims, keepdim) / max(count - correction, 0))


@rule("var", kind="product")
def var(
    input: Dual,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Dual:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if input.stack.dim() == 1:
        return jvp(torch.var, "var", (input,), {"correction": correction, "keepdim": keepdim})
    return _variance(input, dim, correction, keepdim)


@rule("std", kind="product")
def std(input: Dual, *args: Any, **kwargs: Any) -> Tensor:
    return torch.sqrt(torch.var(input, *args, **kwargs))


@rule("var_mean", kind="product")
def var_mean(input: Dual, dim: Any = None, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    if isinstance(dim, bool):
        args, dim = (dim, *args), None
    keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    return var(input, dim, *args, **kwargs), mean(input, dim, keepdim)


@rule("logsumexp", kind="product")
def logsumexp(input: Dual, dim: Any, keepdim: bool = False) -> Dual:
    if input.stack.dim() == 1:
        return jvp(torch.logsumexp, "logsumexp", (input, dim, keepdim), {})
    dims = tuple(each - 1 if each > 0 else each for each in _dims(input, dim))
    x, x_dot = input.stack.unbind(0)
    kept = torch.logsumexp(x, dims, keepdim=True)
    tangent = (torch.exp(x - kept) * x_dot).sum(dims, keepdim)
    return Dual.join(torch.logsumexp(x, dims, keepdim), tangent)
