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
    THREAD_ELEMENTS,
    check_device,
    element_size,
    launch,
    programs,
    rows_of,
    stages,
    tile,
)
from stars_fast.ops.triton.pairs import columns, load_pair, store, store_cotangents, turns

LIMIT = 8192  # widest row in one turn
THREAD_COLUMNS = tl.constexpr(THREAD_ELEMENTS)
WARP_COLUMNS = tl.constexpr(32 * THREAD_ELEMENTS)


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
def load_parameter(parameter, at, exists, ROWS: tl.constexpr):
    """The parameter's values for a turn, for each row of a tile: one row of them would lie over the
    threads otherwise than the tile, and move from one to the other through shared memory."""
    rows = tl.zeros([ROWS, 1], tl.int32)
    return tl.load(parameter + at + rows, exists & (rows == 0), other=0.0).to(tl.float32)


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
            w = load_parameter(weight, at, exists, ROWS)
            n *= w
            nd *= w
        if bias is not None:
            n += load_parameter(bias, at, exists, ROWS)
        store(y, y_pair, at, mask, n, nd, DUAL)


@triton.jit
def _thread_sums(x):
    """Sums [ROWS, BLOCK / 8] of neighbouring columns of a tile, which one thread holds."""
    ROWS: tl.constexpr = x.shape[0]
    GROUP: tl.constexpr = min(x.shape[1], THREAD_COLUMNS)
    return tl.sum(tl.reshape(x, [ROWS, x.shape[1] // GROUP, GROUP]), 2)


@triton.jit
def row_sums(a, b, c, d):
    """The sums [ROWS, 1] of the rows of four tiles: in one reduction over the threads, whose cost
    is its barriers, not what it adds; or one by one, where a row is of one warp and needs none."""
    if a.shape[1] <= WARP_COLUMNS:
        a_sum, b_sum = tl.sum(a, 1), tl.sum(b, 1)
        c_sum, d_sum = tl.sum(c, 1), tl.sum(d, 1)
    else:
        first = tl.join(_thread_sums(a), _thread_sums(b))
        second = tl.join(_thread_sums(c), _thread_sums(d))
        first, second = tl.split(tl.sum(tl.join(first, second), 1))
        a_sum, b_sum = tl.split(first)
        c_sum, d_sum = tl.split(second)
    return a_sum[:, None], b_sum[:, None], c_sum[:, None], d_sum[:, None]


@triton.jit
def held_parameter(
    parameter, ROWS: tl.constexpr, BLOCK: tl.constexpr, width, WHOLE: tl.constexpr
):  # fmt: skip
    """The parameter of WHOLE rows, loaded once for all of a program's; 0.0 else."""
    held = 0.0
    if WHOLE:
        at, exists = columns(0, width, BLOCK)
        held = load_parameter(parameter, at, exists, ROWS)
    return held


@triton.jit
def parameter_at(parameter, held, at, exists, WHOLE: tl.constexpr):
    """The parameter's values for a turn, `held` or loaded."""
    value = held
    if not WHOLE:
        value = load_parameter(parameter, at, exists, 1)  # tiles of several rows are WHOLE
    return value


@triton.jit
def _load_weighted(
    grad, pair, weight, held, at, exists, mask, DUAL: tl.constexpr, WHOLE: tl.constexpr
):
    """The cotangents of n and nd from those of y and yd."""
    a, b = load_pair(grad, pair, at, mask, DUAL)
    if weight is not None:
        w = parameter_at(weight, held, at, exists, WHOLE)
        a *= w
        b *= w
    return a, b


@triton.jit
def _backward_means(
    x, x_pair, grad, grad_pair, weight, held, live, width,
    DUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Means of x, xd and the cotangents of n and nd over the rows."""
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    total_dot = tl.zeros([ROWS, BLOCK], tl.float32)
    a_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        mask = live & exists
        value, dot = load_pair(x, x_pair, at, mask, DUAL)
        a, b = _load_weighted(grad, grad_pair, weight, held, at, exists, mask, DUAL, WHOLE)
        total += value
        total_dot += dot
        a_sum += a
        b_sum += b
    total, total_dot, a_sum, b_sum = row_sums(total, total_dot, a_sum, b_sum)
    return total / width, total_dot / width, a_sum / width, b_sum / width


@triton.jit
def moments(squares, products, s, sd, live, width, eps):
    """r and c of the rows and the means of b n and of a n + b nd, from tiles whose rows sum to
    those of x x, x xd, b x and a x + b xd: what r and c are needed for comes after the one
    reduction."""
    squares, products, s, sd = row_sums(squares, products, s, sd)
    # Without eps the r of rows past the last is infinite.
    r = tl.where(live, tl.rsqrt(squares / width + eps), 0.0)
    c = r * r * products / width
    s = r * s / width
    return r, c, s, r * sd / width - c * s


@triton.jit
def backward_moments(
    x, x_pair, grad, grad_pair, weight, held, live, width, eps, mean, mean_dot,
    CENTRE: tl.constexpr, DUAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The `moments` of the rows at the pointers x and grad."""
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    s = tl.zeros([ROWS, BLOCK], tl.float32)
    sd = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        mask = live & exists
        value, dot = load_pair(x, x_pair, at, mask, DUAL)
        if CENTRE:
            value = tl.where(exists, value - mean, 0.0)
            dot = tl.where(exists, dot - mean_dot, 0.0)
        a, b = _load_weighted(grad, grad_pair, weight, held, at, exists, mask, DUAL, WHOLE)
        squares += value * value
        products += value * dot
        s += b * value
        sd += a * value + b * dot
    return moments(squares, products, s, sd, live, width, eps)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad, x, weight, x_bar, weight_parts, bias_parts,
    rows, width, grad_pair, grad_row, x_pair, x_row, eps,
    CENTRE: tl.constexpr, DUAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    bar_pair = tl.cast(rows, tl.int64) * width
    first = tl.program_id(0)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    held = 0.0
    if weight is not None:
        held = held_parameter(weight, ROWS, BLOCK, width, WHOLE)
    for index in tl.range(first, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = index * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < rows
        x_at = x + row.to(tl.int64) * x_row
        grad_at = grad + row.to(tl.int64) * grad_row
        bar_at = x_bar + row.to(tl.int64) * width
        mean, mean_dot, a_mean, b_mean = 0.0, 0.0, 0.0, 0.0
        if CENTRE:
            mean, mean_dot, a_mean, b_mean = _backward_means(
                x_at, x_pair, grad_at, grad_pair, weight, held, live, width,
                DUAL, ROWS, BLOCK, WHOLE,
            )  # fmt: skip
        r, c, s_mean, sd_mean = backward_moments(
            x_at, x_pair, grad_at, grad_pair, weight, held, live, width, eps, mean, mean_dot,
            CENTRE, DUAL, ROWS, BLOCK, WHOLE,
        )  # fmt: skip
        for turn in range(turns(width, BLOCK, WHOLE)):
            at, exists = columns(turn, width, BLOCK)
            mask = live & exists
            n, nd = load_normalised(x_at, x_pair, at, mask, mean, mean_dot, r, c, CENTRE, DUAL)
            y_bar, yd_bar = load_pair(grad_at, grad_pair, at, mask, DUAL)
            a = y_bar
            b = yd_bar
            if weight is not None:
                w = parameter_at(weight, held, at, exists, WHOLE)
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
        rows.data, parameter(weight, x), parameter(bias, x), y,
        count, width, rows.pair, rows.stride, eps, CENTRE=centre, DUAL=dual, **meta,
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
        grads.data, rows.data, parameter(weight, x), x_bar, weight_parts, bias_parts,
        count, width, grads.pair, grads.stride, rows.pair, rows.stride, eps,
        CENTRE=centre, DUAL=dual, STAGES=stages(x, 4 if dual else 2, meta),
        maxnreg=MAX_REGISTERS, **meta,
    )  # fmt: skip
    return x_bar, total(weight_parts, x), total(bias_parts, x)


def parameter(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """A parameter as the kernels on the rows x read it.

    Raises:
        RuntimeError: it is on another device.
    """
    if weight is None:
        return None
    check_device(weight, x)
    return weight.contiguous()


def parts(x: Tensor, programs: int, width: int) -> Tensor:
    """One sum [D] in fp32 a program."""
    return x.new_empty((programs, width), dtype=torch.float32)


def total(parts: Tensor | None, x: Tensor) -> Tensor:
    """The sum over the programs, [0] where there is none."""
    return x.new_empty(0, dtype=torch.float32) if parts is None else parts.sum(0)
