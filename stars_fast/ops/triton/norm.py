"""RMSNorm and LayerNorm in Triton. Formulas: `ops/norm.py`.

A program of the backward goes through its share of the rows and keeps the gradients of weight and
bias in registers; their sum over the programs, in a fixed order, follows.

The centring of x_bar and xd_bar that LayerNorm needs is done on the cotangents of n and nd: the
columns of n and nd sum to 0, so the two give the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stars_fast.ops.triton import formulas
from stars_fast.ops.triton.launch import (
    MAX_REGISTERS,
    element_size,
    launch,
    programs,
    rows_of,
    tile,
)
from stars_fast.ops.triton.pairs import columns, load_pair, store, store_cotangents, turns

LIMIT = 8192  # widest row in one turn


@triton.jit
def row_statistics(
    x, pair, live, width, eps,
    CENTRE: tl.constexpr, DUAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Means of x and xd, r and c [ROWS, 1] of the rows at the pointers x [ROWS, 1]."""
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    total_dot = tl.zeros([ROWS, BLOCK], tl.float32)
    if CENTRE:
        for turn in range(turns(width, BLOCK, WHOLE)):
            at, exists = columns(turn, width, BLOCK)
            value, dot = load_pair(x, pair, at, live & exists, DUAL)
            total += value
            total_dot += dot
    mean = tl.sum(total, 1)[:, None] / width
    mean_dot = tl.sum(total_dot, 1)[:, None] / width
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        value, dot = load_pair(x, pair, at, live & exists, DUAL)
        if CENTRE:
            value = tl.where(exists, value - mean, 0.0)
            dot -= mean_dot
        squares += value * value
        products += value * dot
    r = tl.rsqrt(tl.sum(squares, 1)[:, None] / width + eps)
    # Without eps the r of rows past the last is infinite.
    r = tl.where(live, r, 0.0)
    return mean, mean_dot, r, r * r * tl.sum(products, 1)[:, None] / width


@triton.jit
def load_normalised(
    x, pair, at, mask, mean, mean_dot, r, c, CENTRE: tl.constexpr, DUAL: tl.constexpr
):  # fmt: skip
    """n and nd."""
    value, dot = load_pair(x, pair, at, mask, DUAL)
    if CENTRE:
        value -= mean
        dot -= mean_dot
    return formulas.normalise(value, dot, r, c)


@triton.jit
def load_parameter(parameter, at, exists):
    return tl.load(parameter + at, exists, other=0.0).to(tl.float32)


@triton.jit
def weight_cotangent(a, b, n, nd, DUAL: tl.constexpr):
    """Each element's share of the gradient of the weight, from the cotangents of y and yd."""
    return a * n + b * nd if DUAL else b * n


@triton.jit
def add_to_parts(parts, at, exists, product, begun):
    """Add rows to a program's sum in memory, for rows of several turns."""
    if begun:
        product += tl.load(parts + at, exists, other=0.0)
    tl.store(parts + at, product, exists)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, weight, bias, y, rows, width, x_pair, x_row, eps,
    CENTRE: tl.constexpr, DUAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    x += row.to(tl.int64) * x_row
    y += row.to(tl.int64) * width
    y_pair = tl.cast(rows, tl.int64) * width
    mean, mean_dot, r, c = row_statistics(
        x, x_pair, live, width, eps, CENTRE, DUAL, ROWS, BLOCK, WHOLE
    )
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        mask = live & exists
        n, nd = load_normalised(x, x_pair, at, mask, mean, mean_dot, r, c, CENTRE, DUAL)
        if weight is not None:
            w = load_parameter(weight, at, exists)
            n *= w
            nd *= w
        if bias is not None:
            n += load_parameter(bias, at, exists)
        store(y, y_pair, at, mask, n, nd, DUAL)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad, x, weight, x_bar, weight_parts, bias_parts,
    rows, width, grad_pair, grad_row, x_pair, x_row, eps,
    CENTRE: tl.constexpr, DUAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    bar_pair = tl.cast(rows, tl.int64) * width
    first = tl.program_id(0)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for index in range(first, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = index * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < rows
        x_at = x + row.to(tl.int64) * x_row
        grad_at = grad + row.to(tl.int64) * grad_row
        bar_at = x_bar + row.to(tl.int64) * width
        mean, mean_dot, r, c = row_statistics(
            x_at, x_pair, live, width, eps, CENTRE, DUAL, ROWS, BLOCK, WHOLE
        )
        s = tl.zeros([ROWS, BLOCK], tl.float32)
        sd = tl.zeros([ROWS, BLOCK], tl.float32)
        a_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        for turn in range(turns(width, BLOCK, WHOLE)):
            at, exists = columns(turn, width, BLOCK)
            mask = live & exists
            n, nd = load_normalised(x_at, x_pair, at, mask, mean, mean_dot, r, c, CENTRE, DUAL)
            a, b = load_pair(grad_at, grad_pair, at, mask, DUAL)
            if weight is not None:
                w = load_parameter(weight, at, exists)
                a *= w
                b *= w
            s += b * n
            sd += a * n + b * nd
            if CENTRE:
                a_sum += a
                b_sum += b
        s_mean = tl.sum(s, 1)[:, None] / width
        sd_mean = tl.sum(sd, 1)[:, None] / width
        a_mean = tl.sum(a_sum, 1)[:, None] / width
        b_mean = tl.sum(b_sum, 1)[:, None] / width
        for turn in range(turns(width, BLOCK, WHOLE)):
            at, exists = columns(turn, width, BLOCK)
            mask = live & exists
            n, nd = load_normalised(x_at, x_pair, at, mask, mean, mean_dot, r, c, CENTRE, DUAL)
            y_bar, yd_bar = load_pair(grad_at, grad_pair, at, mask, DUAL)
            a = y_bar
            b = yd_bar
            if weight is not None:
                w = load_parameter(weight, at, exists)
                a *= w
                b *= w
            if CENTRE:
                a -= a_mean
                b -= b_mean
            bar, bar_dot = formulas.normalise_backward(a, b, n, nd, r, c, s_mean, sd_mean)
            store_cotangents(bar_at, bar_pair, at, mask, bar, bar_dot, DUAL)
            if weight_parts is not None:
                product = weight_cotangent(y_bar, yd_bar, n, nd, DUAL)
                if WHOLE:
                    weight_sum += product
                else:
                    add_to_parts(weight_parts + first * width, at, exists, product, index > first)
            if bias_parts is not None:
                if WHOLE:
                    bias_sum += y_bar
                else:
                    add_to_parts(bias_parts + first * width, at, exists, y_bar, index > first)
        if not WHOLE:
            # Threads need not load_pair from the parts what they stored themselves.
            tl.debug_barrier()
    if WHOLE:
        at = tl.arange(0, BLOCK)
        if weight_parts is not None:
            tl.store(weight_parts + first * width + at, tl.sum(weight_sum, 0), at < width)
        if bias_parts is not None:
            tl.store(bias_parts + first * width + at, tl.sum(bias_sum, 0), at < width)


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centre: bool, dual: bool
) -> Tensor:
    """The op `norm` of `ops/library.py`: x [2, ..., D] or [..., D] -> the same, contiguous."""
    count, width = element_size(x, dual)
    rows = rows_of(x, dual)
    y = x.new_empty(x.shape)
    meta = tile(width, LIMIT)
    launch(
        _forward, triton.cdiv(count, meta["ROWS"]),
        rows.data, parameter(weight), parameter(bias), y, count, width, rows.pair, rows.stride, eps,
        CENTRE=centre, DUAL=dual, **meta,
    )  # fmt: skip
    return y


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    centre: bool,
    dual: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op `norm_backward`: x_bar like x, weight_bar and bias_bar [D] fp32 or [0]."""
    count, width = element_size(x, dual)
    rows, grads = rows_of(x, dual), rows_of(grad, dual)
    x_bar = x.new_empty(x.shape)
    meta = tile(width, LIMIT)
    shared = programs(x, triton.cdiv(count, meta["ROWS"]), meta["num_warps"])
    weight_parts = parts(x, shared, width) if weight_grad else None
    bias_parts = parts(x, shared, width) if bias_grad else None
    launch(
        _backward, shared,
        grads.data, rows.data, parameter(weight), x_bar, weight_parts, bias_parts,
        count, width, grads.pair, grads.stride, rows.pair, rows.stride, eps,
        CENTRE=centre, DUAL=dual, maxnreg=MAX_REGISTERS, **meta,
    )  # fmt: skip
    return x_bar, total(weight_parts, x), total(bias_parts, x)


def parameter(weight: Tensor | None) -> Tensor | None:
    """A parameter as the kernels read it."""
    return None if weight is None else weight.contiguous()


def parts(x: Tensor, programs: int, width: int) -> Tensor:
    """One sum [D] in fp32 a program."""
    return x.new_empty((programs, width), dtype=torch.float32)


def total(parts: Tensor | None, x: Tensor) -> Tensor:
    """The sum over the programs, [0] where there is none."""
    return x.new_empty(0, dtype=torch.float32) if parts is None else parts.sum(0)
