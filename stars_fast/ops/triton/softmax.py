"""Softmax over the last dimension in Triton. Formulas: `ops/softmax.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stars_fast.ops.triton import formulas
from stars_fast.ops.triton.launch import element_size, in_units, launch, rows_of, tile
from stars_fast.ops.triton.pairs import columns, load_pair, store, store_cotangents, turns

LIMIT = 8192  # widest row in one turn
NARROWEST = 32  # rows that share a kernel


@triton.jit
def _load_logits(x, pair, at, mask, DUAL: tl.constexpr):
    value, dot = load_pair(x, pair, at, mask, DUAL)
    return tl.where(mask, value, float("-inf")), dot


@triton.jit(do_not_specialize=["rows", "width", "x_pair", "x_row"])
def _forward(
    x, y, rows, width, x_pair, x_row,
    UNIT: tl.constexpr, DUAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    width *= UNIT
    x_pair = tl.cast(x_pair, tl.int64) * UNIT
    x += row.to(tl.int64) * x_row * UNIT
    y += row.to(tl.int64) * width
    y_pair = tl.cast(rows, tl.int64) * width
    top = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        value, _ = _load_logits(x, x_pair, at, live & exists, DUAL)
        top = tl.maximum(top, value)
    peak = tl.max(top, 1)[:, None]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    product = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        value, dot = _load_logits(x, x_pair, at, live & exists, DUAL)
        e = tl.exp(value - peak)
        total += e
        product += e * dot
    scale = 1 / tl.sum(total, 1)[:, None]
    mu = scale * tl.sum(product, 1)[:, None]
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        mask = live & exists
        value, dot = _load_logits(x, x_pair, at, mask, DUAL)
        p = scale * tl.exp(value - peak)
        store(y, y_pair, at, mask, p, p * (dot - mu), DUAL)


@triton.jit(
    do_not_specialize=["rows", "width", "grad_pair", "grad_row", "y_pair", "y_row"]
)  # fmt: skip
def _backward(
    grad, y, x_bar, rows, width, grad_pair, grad_row, y_pair, y_row,
    UNIT: tl.constexpr, DUAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    width *= UNIT
    grad_pair = tl.cast(grad_pair, tl.int64) * UNIT
    y_pair = tl.cast(y_pair, tl.int64) * UNIT
    grad += row.to(tl.int64) * grad_row * UNIT
    y += row.to(tl.int64) * y_row * UNIT
    x_bar += row.to(tl.int64) * width
    bar_pair = tl.cast(rows, tl.int64) * width
    d = tl.zeros([ROWS, BLOCK], tl.float32)
    dd = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        a, b = load_pair(grad, grad_pair, at, live & exists, DUAL)
        p, pd = load_pair(y, y_pair, at, live & exists, DUAL)
        d += p * b
        dd += p * a + pd * b
    d_row = tl.sum(d, 1)[:, None]
    dd_row = tl.sum(dd, 1)[:, None]
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        mask = live & exists
        a, b = load_pair(grad, grad_pair, at, mask, DUAL)
        p, pd = load_pair(y, y_pair, at, mask, DUAL)
        bar, bar_dot = formulas.softmax_backward(a, b, p, pd, d_row, dd_row)
        store_cotangents(x_bar, bar_pair, at, mask, bar, bar_dot, DUAL)


def softmax(x: Tensor, dual: bool) -> Tensor:
    """The op `softmax` of `ops/library.py`: x [2, ..., N] or [..., N] -> the same, contiguous."""
    count, width = element_size(x, dual)
    rows = rows_of(x, dual)
    y = x.new_empty(x.shape)
    meta = tile(max(width, NARROWEST), LIMIT)
    unit, steps = in_units(width, rows)
    launch(
        _forward, triton.cdiv(count, meta["ROWS"]),
        rows.data, y, count, *steps, UNIT=unit, DUAL=dual, **meta,
    )  # fmt: skip
    return y


def softmax_backward(grad: Tensor, y: Tensor, dual: bool) -> Tensor:
    """The op `softmax_backward`: the gradient of x, like y."""
    count, width = element_size(y, dual)
    grads, rows = rows_of(grad, dual), rows_of(y, dual)
    x_bar = y.new_empty(y.shape)
    meta = tile(max(width, NARROWEST), LIMIT)
    unit, steps = in_units(width, grads, rows)
    launch(
        _backward, triton.cdiv(count, meta["ROWS"]),
        grads.data, rows.data, x_bar, count, *steps, UNIT=unit, DUAL=dual, **meta,
    )  # fmt: skip
    return x_bar
