"""Reductions into indexed places and sampling at points of a grid, where torch has no forward
derivative."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.forward_ad import jvp
from stars_fast.dual.precision import widened
from stars_fast.dual.rule import rule
from stars_fast.dual.tensor import Dual, primal_of

# -- reductions


def _places(index: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """For each element of `index`, its place in the flat memory of a tensor of `shape`."""
    places = torch.zeros_like(index)
    for axis, size in enumerate(shape):
        along = torch.arange(index.shape[axis], device=index.device)
        along = along.view(-1, *[1] * (index.dim() - axis - 1))
        places = places * size + (index if axis == dim else along)
    return places.flatten()


def _turns(places: Tensor) -> Tensor:
    """How many elements before it fall on the same place, for each element."""
    order = torch.argsort(places, stable=True)
    ranked = places[order]
    starts = torch.searchsorted(ranked, ranked)  # where its group begins
    turns = torch.empty_like(places)
    turns[order] = torch.arange(len(places), device=places.device) - starts
    return turns


def _scatter_product(input: Any, dim: int, index: Tensor, src: Any, include_self: bool) -> Any:
    """One factor of each place at a time: no division by an entry that may be 0."""
    shape = input.shape
    places = _places(index, dim % max(len(shape), 1), shape)
    values = src.flatten()
    result = input.flatten()
    if not include_self:
        touched = torch.zeros(len(result), dtype=torch.bool, device=index.device)
        touched[places] = True
        result = result.masked_fill(touched, 1.0)
    turns = _turns(places)
    for turn in range(int(turns.max()) + 1 if len(turns) else 0):
        chosen = turns == turn
        ones = torch.ones(len(result), dtype=values.dtype, device=index.device)
        result = result * ones.index_put((places[chosen],), values[chosen])
    return result.view(shape)


def _scatter_extreme(
    input: Any, dim: int, index: Tensor, src: Any, reduce: str, include_self: bool
) -> Any:
    """The mean of the entries that are the largest (or smallest) of their place. torch counts an
    entry of the input among them even where the input is left out."""
    own, others = primal_of(input).detach(), primal_of(src).detach()
    extreme = torch.scatter_reduce(own, dim, index, others, reduce, include_self=include_self)
    mine = own == extreme
    if not include_self:
        mine = mine.scatter(dim, index, False)
    theirs = others == extreme.gather(dim, index)
    counts = mine.to(own.dtype).scatter_add(dim, index, theirs.to(own.dtype))
    chosen = input.masked_fill(~mine, 0.0)
    return torch.scatter_add(chosen, dim, index, src.masked_fill(~theirs, 0.0)) / counts


@rule("scatter_reduce", kind="product")
def scatter_reduce(
    input: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    index = primal_of(index)
    # Of a larger source torch's own backward fails.
    src = src[tuple(slice(size) for size in index.shape)]
    if reduce == "prod":
        return _scatter_product(input, dim, index, src, include_self)
    if reduce in ("amax", "amin"):
        return _scatter_extreme(input, dim, index, src, reduce, include_self)
    options = {"include_self": include_self}
    return jvp(torch.scatter_reduce, "scatter_reduce", (input, dim, index, src, reduce), options)


@rule("index_reduce", kind="product")
def index_reduce(
    input: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    shape = [1] * source.dim()
    if shape:
        shape[dim] = -1
    wide = primal_of(index).view(shape).expand(source.shape)
    return scatter_reduce(input, dim, wide, source, reduce, include_self=include_self)


# -- sampling

_LINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def _reflected(x: Any, low: float, span: float) -> Any:
    if span == 0:
        return x * 0.0
    distance = torch.abs(x - low)
    flips = torch.floor(primal_of(distance) / span)
    rest = distance - flips * span
    return torch.where(flips % 2 == 0, rest, span - rest) + low


def _coordinate(x: Any, size: int, padding: int, align_corners: bool) -> Any:
    """From [-1, 1] to pixels, as torch.nn.functional.grid_sample describes it."""
    x = (x + 1) * ((size - 1) / 2) if align_corners else ((x + 1) * size - 1) / 2
    if padding == _REFLECTION:
        low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        x = _reflected(x, low, span)
    if padding != _ZEROS:
        value = primal_of(x).detach()
        inside = (value > 0) & (value < size - 1)
        x = torch.where(inside, x, value.clamp(0, size - 1))
    return x


def _sample_linearly(input: Any, grid: Any, padding: int, align_corners: bool) -> Any:
    """The corners around each point, weighted by its distances from the opposite ones."""
    sizes = input.shape[2:]
    corners, weights = [], []
    for axis, size in enumerate(sizes):
        # The last entry of a point is of the first axis.
        x = _coordinate(grid[..., len(sizes) - 1 - axis], size, padding, align_corners).flatten(1)
        first = torch.floor(primal_of(x)).detach()
        rest = x - first
        corners.append((first.long(), first.long() + 1))
        weights.append((1 - rest, rest))
    pixels = input.flatten(2)
    parts = []
    for choice in itertools.product((0, 1), repeat=len(sizes)):
        place = torch.zeros_like(corners[0][0])
        seen = torch.ones_like(place, dtype=torch.bool)
        weight: Any = 1.0
        for axis, side in enumerate(choice):
            at = corners[axis][side]
            seen &= (at >= 0) & (at < sizes[axis])
            place = place * sizes[axis] + at.clamp(0, sizes[axis] - 1)
            weight = weights[axis][side] * weight
        values = torch.gather(pixels, 2, place.unsqueeze(1).expand(-1, pixels.shape[1], -1))
        parts.append(values * weight.masked_fill(~seen, 0.0).unsqueeze(1))
    return sum(parts[1:], start=parts[0]).unflatten(2, grid.shape[1:-1])


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d", kind="product", owners=(torch,))
def grid_sampler(
    input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Any:
    """Linear in the input; in the grid by the corners of each point."""
    options = interpolation_mode, padding_mode, align_corners
    if interpolation_mode == _NEAREST:
        grid = primal_of(grid).detach()  # piecewise constant in the grid
        if type(input) is not Dual:
            return torch.grid_sampler(input, grid, *options)
    if type(grid) is not Dual:
        return Dual.join(
            *(torch.grid_sampler(half, grid, *options) for half in input.stack.unbind(0))
        )
    if interpolation_mode == _CUBIC:
        raise RuntimeError(
            "stars_fast: grid_sample(mode='bicubic') has no derivative by the grid here; use "
            "mode='bilinear', or detach the grid"
        )
    sampled = _sample_linearly(widened(input), widened(grid), padding_mode, align_corners)
    none = torch.grid_sampler(primal_of(input)[:0], primal_of(grid)[:0], *options)
    return sampled.to(none.dtype)
