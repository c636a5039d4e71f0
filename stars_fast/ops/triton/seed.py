"""Squares of rows, and random directions that are drawn again instead of stored, in Triton.

Element (row, column) of the field is a function of (seed, row, column) alone: the Philox counter is
(column / 4, row), its four words give the normal numbers of four columns. So the field does not
depend on tiles, and no two elements of up to 2^32 rows of 2^34 columns share a counter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stars_fast.ops.triton.launch import element_size, launch, rows_of, tile
from stars_fast.ops.triton.pairs import columns, turns

LIMIT = 4096  # widest row in one turn


@triton.jit
def _normals(seed, row, turn, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The field [ROWS, BLOCK] at rows [ROWS, 1] and the columns of a turn."""
    quad = turn * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    row, quad = tl.broadcast(row, quad)
    zero = tl.zeros_like(quad)
    words = tl.philox(seed, quad, row, zero, zero)
    z0, z1 = tl.pair_uniform_to_normal(_uniform(words[0]), _uniform(words[1]))
    z2, z3 = tl.pair_uniform_to_normal(_uniform(words[2]), _uniform(words[3]))
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))


@triton.jit
def _uniform(word):
    return tl.uint_to_uniform_float(word)


@triton.jit(do_not_specialize=["rows"])
def _normal_squares(
    seed, sums, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.load(seed)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        _, exists = columns(turn, width, BLOCK)
        z = tl.where(exists, _normals(key, row, turn, ROWS, BLOCK), 0.0)
        total += z * z
    tl.store(sums + row, tl.sum(total, 1)[:, None], row < rows)


@triton.jit(do_not_specialize=["rows"])
def _seed_stack(
    h, seed, factor, stack, rows, width, h_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    key = tl.load(seed)
    scale = tl.load(factor + row, live, other=0.0).to(tl.float32)
    h += row.to(tl.int64) * h_row
    stack += row.to(tl.int64) * width
    pair = tl.cast(rows, tl.int64) * width
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        mask = live & exists
        tl.store(stack + at, tl.load(h + at, mask), mask)
        direction = scale * _normals(key, row, turn, ROWS, BLOCK)
        tl.store(stack + pair + at, direction.to(stack.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def _row_squares(
    x, sums, rows, width, x_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    x += row.to(tl.int64) * x_row
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        value = tl.load(x + at, live & exists, other=0.0).to(tl.float32)
        total += value * value
    tl.store(sums + row, tl.sum(total, 1)[:, None], live)


@triton.jit(do_not_specialize=["rows"])
def _row_squares_backward(
    grad, x, x_bar, rows, width, x_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    x += row.to(tl.int64) * x_row
    x_bar += row.to(tl.int64) * width
    twice = 2 * tl.load(grad + row, live, other=0.0).to(tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        value = tl.load(x + at, live & exists, other=0.0).to(tl.float32)
        tl.store(x_bar + at, (twice * value).to(x_bar.dtype.element_ty), live & exists)


def normal_squares(seed: Tensor, rows: int, width: int) -> Tensor:
    """The op `normal_squares` of `ops/library.py`: seed int64 [1] -> [rows] fp32."""
    sums = seed.new_empty(rows, dtype=torch.float32)
    meta = _field_tile(width)
    launch(_normal_squares, triton.cdiv(rows, meta["ROWS"]), seed, sums, rows, width, **meta)
    return sums


def seed_stack(h: Tensor, seed: Tensor, factor: Tensor) -> Tensor:
    """The op `seed_stack`: h [..., D], seed int64 [1], factor [...] -> [2, ..., D] like h."""
    count, width = element_size(h, False)
    rows = rows_of(h, False)
    stack = h.new_empty((2, *h.shape))
    meta = _field_tile(width)
    launch(
        _seed_stack, triton.cdiv(count, meta["ROWS"]),
        rows.data, seed, factor.contiguous(), stack, count, width, rows.stride, **meta,
    )  # fmt: skip
    return stack


def row_squares(x: Tensor) -> Tensor:
    """The op `row_squares`: x [..., D] -> [...] fp32."""
    count, width = element_size(x, False)
    rows = rows_of(x, False)
    sums = x.new_empty(x.shape[:-1], dtype=torch.float32)
    meta = tile(width, LIMIT)
    launch(
        _row_squares, triton.cdiv(count, meta["ROWS"]),
        rows.data, sums, count, width, rows.stride, **meta,
    )  # fmt: skip
    return sums


def row_squares_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The op `row_squares_backward`: grad [...], x [..., D] -> the gradient of x, contiguous."""
    count, width = element_size(x, False)
    rows = rows_of(x, False)
    x_bar = x.new_empty(x.shape)
    meta = tile(width, LIMIT)
    launch(
        _row_squares_backward, triton.cdiv(count, meta["ROWS"]),
        grad.contiguous(), rows.data, x_bar, count, width, rows.stride, **meta,
    )  # fmt: skip
    return x_bar


def _field_tile(width: int) -> dict[str, int]:
    """Counters come by four columns."""
    return tile(max(width, 4), LIMIT)
