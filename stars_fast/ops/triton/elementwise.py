"""Elementwise functions and gated activations in Triton. Formulas: `ops/pointwise.py` and
`ops/gated.py`. Inputs may be strided rows, such as the halves of one projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stars_fast.ops.triton import formulas
from stars_fast.ops.triton.launch import Rows, element_size, flat_tile, launch, rows_of
from stars_fast.ops.triton.pairs import load_pair, store, store_cotangents

# What `formulas.jet` knows.
FUNCTIONS = frozenset(
    "silu gelu gelu_tanh relu identity sigmoid tanh exp log sqrt rsqrt reciprocal square sin cos "
    "erf abs sigmoid_result tanh_result exp_result sqrt_result rsqrt_result "
    "reciprocal_result".split()
)


@triton.jit
def _place(rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Row [ROWS, 1], column [1, BLOCK] and mask of this program's tile."""
    across = (width - 1) // BLOCK + 1  # width + BLOCK may lie beyond 32 bits
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit(do_not_specialize=["rows"])
def _pointwise(
    x, y, rows, width, x_pair, x_row,
    NAME: tl.constexpr, DUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, mask = _place(rows, width, ROWS, BLOCK)
    value, dot = load_pair(x, x_pair, row * x_row + column, mask, DUAL)
    result, result_dot = formulas.pointwise(value, dot, NAME)
    pair = tl.cast(rows, tl.int64) * width
    store(y, pair, row * width + column, mask, result, result_dot, DUAL)


@triton.jit(do_not_specialize=["rows"])
def _pointwise_backward(
    grad, x, x_bar, rows, width, grad_pair, grad_row, x_pair, x_row,
    NAME: tl.constexpr, DUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, mask = _place(rows, width, ROWS, BLOCK)
    a, b = load_pair(grad, grad_pair, row * grad_row + column, mask, DUAL)
    value, dot = load_pair(x, x_pair, row * x_row + column, mask, DUAL)
    bar, bar_dot = formulas.pointwise_backward(a, b, value, dot, NAME)
    pair = tl.cast(rows, tl.int64) * width
    store_cotangents(x_bar, pair, row * width + column, mask, bar, bar_dot, DUAL)


@triton.jit(do_not_specialize=["rows"])
def _gated(
    g, u, y, rows, width, g_pair, g_row, u_pair, u_row,
    NAME: tl.constexpr, DUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, mask = _place(rows, width, ROWS, BLOCK)
    gate, gate_dot = load_pair(g, g_pair, row * g_row + column, mask, DUAL)
    up, up_dot = load_pair(u, u_pair, row * u_row + column, mask, DUAL)
    result, result_dot = formulas.gated(gate, gate_dot, up, up_dot, NAME)
    pair = tl.cast(rows, tl.int64) * width
    store(y, pair, row * width + column, mask, result, result_dot, DUAL)


@triton.jit(do_not_specialize=["rows"])
def _gated_backward(
    grad, g, u, g_bar, u_bar, rows, width, grad_pair, grad_row, g_pair, g_row, u_pair, u_row,
    NAME: tl.constexpr, DUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, mask = _place(rows, width, ROWS, BLOCK)
    a, b = load_pair(grad, grad_pair, row * grad_row + column, mask, DUAL)
    gate, gate_dot = load_pair(g, g_pair, row * g_row + column, mask, DUAL)
    up, up_dot = load_pair(u, u_pair, row * u_row + column, mask, DUAL)
    gate_bar, gate_dot_bar, up_bar, up_dot_bar = formulas.gated_backward(
        a, b, gate, gate_dot, up, up_dot, NAME
    )
    pair = tl.cast(rows, tl.int64) * width
    at = row * width + column
    store_cotangents(g_bar, pair, at, mask, gate_bar, gate_dot_bar, DUAL)
    store_cotangents(u_bar, pair, at, mask, up_bar, up_dot_bar, DUAL)


def pointwise(x: Tensor, name: str, dual: bool) -> Tensor:
    """The op `pointwise` of `ops/library.py`: x [2, ...] or [...] -> the same, contiguous."""
    y = x.new_empty(x.shape)
    _launch(_pointwise, (x,), (y,), name, dual)
    return y


def pointwise_backward(grad: Tensor, x: Tensor, name: str, dual: bool) -> Tensor:
    """The op `pointwise_backward`: the gradient of x, like x."""
    x_bar = x.new_empty(x.shape)
    _launch(_pointwise_backward, (grad, x), (x_bar,), name, dual)
    return x_bar


def gated(g: Tensor, u: Tensor, name: str, dual: bool) -> Tensor:
    """The op `gated`: g and u [2, ..., D] or [..., D] -> the same, contiguous."""
    y = g.new_empty(g.shape)
    _launch(_gated, (g, u), (y,), name, dual)
    return y


def gated_backward(
    grad: Tensor, g: Tensor, u: Tensor, name: str, dual: bool
) -> tuple[Tensor, Tensor]:
    """The op `gated_backward`: the gradients of g and u, contiguous."""
    g_bar, u_bar = g.new_empty(g.shape), u.new_empty(u.shape)
    _launch(_gated_backward, (grad, g, u), (g_bar, u_bar), name, dual)
    return g_bar, u_bar


def _launch(
    kernel: triton.JITFunction,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    name: str,
    dual: bool,
) -> None:
    if name not in FUNCTIONS:
        raise ValueError(f"name: expected one of {sorted(FUNCTIONS)}, got {name!r}")
    if inputs[0].numel() == 0:
        return
    if all(x.is_contiguous() for x in inputs):
        # One row: no tile is cut at the end of another.
        count, width = 1, inputs[0].numel() // (2 if dual else 1)
        views = [Rows(x, width, width) for x in inputs]
    else:
        count, width = element_size(inputs[0], dual)
        views = [rows_of(x, dual) for x in inputs]
    meta = flat_tile(width)
    tiles = triton.cdiv(count, meta["ROWS"]) * triton.cdiv(width, meta["BLOCK"])
    strides = [stride for rows in views for stride in (rows.pair, rows.stride)]
    launch(
        kernel, tiles, *(rows.data for rows in views), *outputs, count, width, *strides,
        NAME=name, DUAL=dual, **meta,
    )  # fmt: skip
