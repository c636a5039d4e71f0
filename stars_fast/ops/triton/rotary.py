"""Rotary position embedding in Triton. Formulas: `ops/rotary.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stars_fast.ops.triton import formulas
from stars_fast.ops.triton.launch import check_device, launch, whole_tile


@triton.jit
def _load_halves(x, offsets, column, half, mask):
    first = tl.load(x + offsets + column, mask, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + half + column, mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit(do_not_specialize=["rows", "batch", "length"])
def _rotate(
    x, cos, sin, y, rows, batch, heads, length, half,
    x_stack, x_batch, x_head, x_token, cos_batch, cos_token, sin_batch, sin_token,
    TRANSPOSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Rows are heads, in the memory order of the result.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < half)
    head = (row % heads).to(tl.int64)
    token = (row // heads % length).to(tl.int64)
    sample = (row // heads // length % batch).to(tl.int64)
    stack = (row // heads // length // batch).to(tl.int64)
    x_at = stack * x_stack + sample * x_batch + head * x_head + token * x_token
    x1, x2 = _load_halves(x, x_at, column, half, mask)
    cos1, cos2 = _load_halves(cos, sample * cos_batch + token * cos_token, column, half, mask)
    sin1, sin2 = _load_halves(sin, sample * sin_batch + token * sin_token, column, half, mask)
    y1, y2 = formulas.rotate(x1, x2, cos1, cos2, sin1, sin2, TRANSPOSE)
    y += row.to(tl.int64) * 2 * half + column
    tl.store(y, y1.to(y.dtype.element_ty), mask)
    tl.store(y + half, y2.to(y.dtype.element_ty), mask)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, transpose: bool) -> Tensor:
    """The op `rotary` of `ops/library.py`: x [N, B, H, S, D], cos and sin [B or 1, S, D] -> x's
    shape in the memory order [N, B, S, H, D]."""
    stack, batch, heads, length, width = x.shape
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    for table in (cos, sin):
        check_device(table, x)
    y = x.new_empty((stack, batch, length, heads, width))
    rows = stack * batch * length * heads
    meta = whole_tile(width // 2)
    launch(
        _rotate, triton.cdiv(rows, meta["ROWS"]),
        x, cos, sin, y, rows, batch, heads, length, width // 2, *x.stride()[:4],
        *_table_strides(cos), *_table_strides(sin), TRANSPOSE=transpose, **meta,
    )  # fmt: skip
    return y.transpose(2, 3)


def _table_strides(table: Tensor) -> tuple[int, int]:
    return (0 if table.shape[0] == 1 else table.stride(0)), table.stride(1)
