"""Residual sum and norm in one pass, in Triton: h = residual + RMSNorm(branch), x = RMSNorm(h).
Formulas: `ops/norm.py`. The statistics of h are those of h as it is stored, which is what the
backward finds."""

from __future__ import annotations

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
    stages,
    tile,
)
from stars_fast.ops.triton.norm import (
    add_to_parts,
    backward_moments,
    held_parameter,
    load_normalised,
    load_parameter,
    moments,
    parameter,
    parameter_at,
    parts,
    row_statistics,
    total,
    weight_cotangent,
)
from stars_fast.ops.triton.pairs import columns, load_pair, store, store_cotangents, turns

LIMIT = 8192  # widest row in one turn
BACKWARD_LIMIT = 4096  # which holds twice as many values a row


@triton.jit
def _sum(
    branch, branch_pair, residual, residual_pair, weight_out, at, exists, live, r, c,
    DUAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """h and hd, rounded to the dtype they are stored in."""
    mask = live & exists
    h, hd = load_pair(residual, residual_pair, at, mask, DUAL)
    if weight_out is None:
        n, nd = load_pair(branch, branch_pair, at, mask, DUAL)
    else:
        n, nd = load_normalised(branch, branch_pair, at, mask, 0.0, 0.0, r, c, False, DUAL)
        w = load_parameter(weight_out, at, exists, ROWS)
        n *= w
        nd *= w
    dtype = residual.dtype.element_ty
    return (h + n).to(dtype).to(tl.float32), (hd + nd).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    branch, residual, weight_out, weight_in, h, x,
    rows, width, branch_pair, branch_row, residual_pair, residual_row, eps_out, eps_in,
    DUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < rows
    branch += row.to(tl.int64) * branch_row
    residual += row.to(tl.int64) * residual_row
    h += row.to(tl.int64) * width
    x += row.to(tl.int64) * width
    pair = tl.cast(rows, tl.int64) * width
    r_out = 0.0
    c_out = 0.0
    if weight_out is not None:
        _, _, r_out, c_out = row_statistics(
            branch, branch_pair, live, width, eps_out, False, DUAL, ROWS, BLOCK, WHOLE
        )
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        value, dot = _sum(
            branch, branch_pair, residual, residual_pair, weight_out,
            at, exists, live, r_out, c_out, DUAL, ROWS,
        )  # fmt: skip
        squares += value * value
        products += value * dot
    r = tl.rsqrt(tl.sum(squares, 1)[:, None] / width + eps_in)
    c = r * r * tl.sum(products, 1)[:, None] / width
    for turn in range(turns(width, BLOCK, WHOLE)):
        at, exists = columns(turn, width, BLOCK)
        mask = live & exists
        value, dot = _sum(
            branch, branch_pair, residual, residual_pair, weight_out,
            at, exists, live, r_out, c_out, DUAL, ROWS,
        )  # fmt: skip
        n, nd = formulas.normalise(value, dot, r, c)
        w = load_parameter(weight_in, at, exists, ROWS)
        store(h, pair, at, mask, value, dot, DUAL)
        store(x, pair, at, mask, n * w, nd * w, DUAL)


@triton.jit
def _h_cotangents(
    h_bar, h_bar_pair, x_bar, x_bar_pair, h, h_pair, weight_in, held, at, exists, live,
    r, c, s, sd, DUAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Cotangents of h and hd through both results, and what the row adds to weight_in_bar."""
    mask = live & exists
    n, nd = load_normalised(h, h_pair, at, mask, 0.0, 0.0, r, c, False, DUAL)
    y_bar, yd_bar = load_pair(x_bar, x_bar_pair, at, mask, DUAL)
    w = parameter_at(weight_in, held, at, exists, WHOLE)
    a, b = formulas.normalise_backward(y_bar * w, yd_bar * w, n, nd, r, c, s, sd)
    direct, direct_dot = load_pair(h_bar, h_bar_pair, at, mask, DUAL)
    return direct + a, direct_dot + b, weight_cotangent(y_bar, yd_bar, n, nd, DUAL)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    h_bar, x_bar, branch, h, weight_out, weight_in,
    branch_bar, residual_bar, out_parts, in_parts, rows, width,
    h_bar_pair, h_bar_row, x_bar_pair, x_bar_row, branch_pair, branch_row, h_pair, h_row,
    eps_out, eps_in,
    DUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    pair = tl.cast(rows, tl.int64) * width
    first = tl.program_id(0)
    out_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    in_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    in_held = held_parameter(weight_in, ROWS, BLOCK, width, WHOLE)
    out_held = 0.0
    if weight_out is not None:
        out_held = held_parameter(weight_out, ROWS, BLOCK, width, WHOLE)
    for index in tl.range(first, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = index * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < rows
        wide_row = row.to(tl.int64)
        h_bar_at = h_bar + wide_row * h_bar_row
        x_bar_at = x_bar + wide_row * x_bar_row
        branch_at = branch + wide_row * branch_row
        h_at = h + wide_row * h_row
        r, c, s_in, sd_in = backward_moments(
            h_at, h_pair, x_bar_at, x_bar_pair, weight_in, in_held, live, width, eps_in, 0.0, 0.0,
            False, DUAL, ROWS, BLOCK, WHOLE,
        )  # fmt: skip
        if weight_out is not None:
            squares = tl.zeros([ROWS, BLOCK], tl.float32)
            products = tl.zeros([ROWS, BLOCK], tl.float32)
            s = tl.zeros([ROWS, BLOCK], tl.float32)
            sd = tl.zeros([ROWS, BLOCK], tl.float32)
            for turn in range(turns(width, BLOCK, WHOLE)):
                at, exists = columns(turn, width, BLOCK)
                a, b, in_product = _h_cotangents(
                    h_bar_at, h_bar_pair, x_bar_at, x_bar_pair, h_at, h_pair, weight_in, in_held,
                    at, exists, live, r, c, s_in, sd_in, DUAL, WHOLE,
                )  # fmt: skip
                value, dot = load_pair(branch_at, branch_pair, at, live & exists, DUAL)
                w = parameter_at(weight_out, out_held, at, exists, WHOLE)
                squares += value * value
                products += value * dot
                s += b * w * value
                sd += (a * value + b * dot) * w
            r_out, c_out, s_out, sd_out = moments(squares, products, s, sd, live, width, eps_out)
        for turn in range(turns(width, BLOCK, WHOLE)):
            at, exists = columns(turn, width, BLOCK)
            mask = live & exists
            a, b, in_product = _h_cotangents(
                h_bar_at, h_bar_pair, x_bar_at, x_bar_pair, h_at, h_pair, weight_in, in_held,
                at, exists, live, r, c, s_in, sd_in, DUAL, WHOLE,
            )  # fmt: skip
            if weight_out is not None:
                n, nd = load_normalised(
                    branch_at, branch_pair, at, mask, 0.0, 0.0, r_out, c_out, False, DUAL
                )
                w = parameter_at(weight_out, out_held, at, exists, WHOLE)
                bar, bar_dot = formulas.normalise_backward(
                    a * w, b * w, n, nd, r_out, c_out, s_out, sd_out
                )
                out_product = weight_cotangent(a, b, n, nd, DUAL)
                branch_bar_at = branch_bar + wide_row * width
                store_cotangents(branch_bar_at, pair, at, mask, bar, bar_dot, DUAL)
                if WHOLE:
                    out_sum += out_product
                else:
                    add_to_parts(out_parts + first * width, at, exists, out_product, index > first)
            store_cotangents(residual_bar + wide_row * width, pair, at, mask, a, b, DUAL)
            if WHOLE:
                in_sum += in_product
            else:
                add_to_parts(in_parts + first * width, at, exists, in_product, index > first)
        if not WHOLE:
            # Threads need not load_pair from the parts what they stored themselves.
            tl.debug_barrier()
    if WHOLE:
        at = tl.arange(0, BLOCK)
        tl.store(in_parts + first * width + at, tl.sum(in_sum, 0), at < width)
        if weight_out is not None:
            tl.store(out_parts + first * width + at, tl.sum(out_sum, 0), at < width)


def sandwich(
    branch: Tensor,
    residual: Tensor,
    weight_out: Tensor | None,
    weight_in: Tensor,
    eps_out: float,
    eps_in: float,
    dual: bool,
) -> tuple[Tensor, Tensor]:
    """The op `sandwich` of `ops/library.py`: h and x like branch, contiguous."""
    count, width = element_size(branch, dual)
    branches, residuals = rows_of(branch, dual), rows_of(residual, dual)
    h, x = branch.new_empty(branch.shape), branch.new_empty(branch.shape)
    meta = tile(width, LIMIT)
    launch(
        _forward, triton.cdiv(count, meta["ROWS"]),
        branches.data, residuals.data,
        parameter(weight_out, branch), parameter(weight_in, branch), h, x, count, width,
        branches.pair, branches.stride, residuals.pair, residuals.stride, eps_out, eps_in,
        DUAL=dual, **meta,
    )  # fmt: skip
    return h, x


def sandwich_backward(
    h_bar: Tensor,
    x_bar: Tensor,
    branch: Tensor,
    h: Tensor,
    weight_out: Tensor | None,
    weight_in: Tensor,
    eps_out: float,
    eps_in: float,
    dual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op `sandwich_backward`: branch_bar ([0] without weight_out) and residual_bar like h,
    weight_out_bar ([0] without) and weight_in_bar [D] fp32."""
    count, width = element_size(h, dual)
    streams = [rows_of(tensor, dual) for tensor in (h_bar, x_bar, branch, h)]
    normed = weight_out is not None
    branch_bar, residual_bar = h.new_empty(h.shape if normed else 0), h.new_empty(h.shape)
    meta = tile(width, BACKWARD_LIMIT)
    shared = programs(h, triton.cdiv(count, meta["ROWS"]), meta["num_warps"])
    in_parts, out_parts = parts(h, shared, width), parts(h, shared, width) if normed else None
    strides = [stride for rows in streams for stride in (rows.pair, rows.stride)]
    launch(
        _backward, shared,
        *(rows.data for rows in streams), parameter(weight_out, h), parameter(weight_in, h),
        branch_bar, residual_bar, out_parts, in_parts, count, width, *strides, eps_out, eps_in,
        DUAL=dual, STAGES=stages(h, (6 + 2 * normed) // (1 if dual else 2), meta),
        maxnreg=MAX_REGISTERS, **meta,
    )  # fmt: skip
    return branch_bar, residual_bar, total(out_parts, h), total(in_parts, h)
