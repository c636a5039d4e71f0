"""Dual attention without the S x S matrices, forward.

A program holds a block of queries and goes through its keys tile by tile, with the usual running
maximum m and sum l of e = exp(S - m), and beside the sum of e V those of the tangent:
    O = sum e V / l        mu = sum e S_dot / l        O_dot = sum e (S_dot V + V_dot) / l - mu O
The last difference cancels where S_dot has a mean over the keys much larger than its spread, and e
S_dot is rounded to 16 bits before its product with V. So S_dot is taken relative to its value at
the row's first key, which changes nothing but the rounding. 6 matmuls a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stars_fast.ops.triton.attention_parts import (
    CAUSAL,
    LOG2E,
    VARYING,
    constants,
    key_tiles,
    load_tile,
    plane,
    rows_contiguous,
    span,
    spans_and_stride,
    store_pair,
    strides,
    visible_keys,
)
from stars_fast.ops.triton.tiles import pick


@triton.jit
def _forward_tile(
    state,
    held,
    k,
    v,
    rows,
    keys,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
    SLABS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The keys `rows` (those that exist are below `keys`) taken into the state: m, l, the sum of e
    S_dot, and by slab of columns those of O and O_dot."""
    m, total, mu, sums = state
    q, q_dot, shift, lo, hi = held
    k, k_half, k_row = k
    v, v_half, v_row = v
    columns = tl.arange(0, WIDTH)
    tile = tl.trans(load_tile(k, rows, k_row, columns, keys, D, MASKED))
    s = tl.dot(q, tile, input_precision=PRECISION)
    s_dot = tl.dot(q_dot, tile, input_precision=PRECISION)
    tile = tl.trans(load_tile(k + k_half, rows, k_row, columns, keys, D, MASKED))
    s_dot = tl.dot(q, tile, s_dot, input_precision=PRECISION)
    s = s * (scale * LOG2E)
    if MASKED:
        visible = visible_keys(rows[None, :], lo[:, None], hi[:, None], MODE)
        s = tl.where(visible, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1))
    e = tl.exp2(s - top[:, None])
    w = e * (s_dot * scale - shift[:, None])
    old = tl.exp2(m - top)
    total = total * old + tl.sum(e, 1)
    mu = mu * old + tl.sum(w, 1)
    e = e.to(q.dtype)
    w = w.to(q.dtype)
    SLAB: tl.constexpr = WIDTH // SLABS
    new = ()
    for slab in tl.static_range(SLABS):
        columns = tl.arange(0, SLAB) + slab * SLAB
        out, out_dot = sums[slab]
        tile = load_tile(v, rows, v_row, columns, keys, D, MASKED)
        out = tl.dot(e, tile, out * old[:, None], input_precision=PRECISION)
        out_dot = tl.dot(w, tile, out_dot * old[:, None], input_precision=PRECISION)
        tile = load_tile(v + v_half, rows, v_row, columns, keys, D, MASKED)
        out_dot = tl.dot(e, tile, out_dot, input_precision=PRECISION)
        new += ((out, out_dot),)
    return top, total, mu, new


@triton.jit(do_not_specialize=VARYING)
def _forward(
    q,
    k,
    v,
    out,
    lse,
    mu,
    spans,
    span_batch,
    q_half,
    q_batch,
    q_head,
    q_row,
    k_half,
    k_batch,
    k_head,
    k_row,
    v_half,
    v_batch,
    v_head,
    v_row,
    length,
    keys,
    scale,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    MODE: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    HELD: tl.constexpr,
    STREAMED: tl.constexpr,
    SLABS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head, heads, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    block = tl.program_id(0)
    if MODE == CAUSAL:  # the longest first
        block = tl.num_programs(0) - 1 - block
    q = plane(q, batch, head, q_batch, q_head, UNIT)
    k = plane(k, batch, head // GROUP, k_batch, k_head, UNIT)
    v = plane(v, batch, head // GROUP, v_batch, v_head, UNIT)
    k = k, k_half.to(tl.int64) * UNIT, k_row * UNIT
    v = v, v_half.to(tl.int64) * UNIT, v_row * UNIT

    rows = block * HELD + tl.arange(0, HELD)
    columns = tl.arange(0, WIDTH)
    lo, hi = span((spans, span_batch), batch, rows, length, keys, MODE)
    q_tile = load_tile(q, rows, q_row * UNIT, columns, length, D, True)
    q += q_half.to(tl.int64) * UNIT
    q_dot = load_tile(q, rows, q_row * UNIT, columns, length, D, True)

    # S_dot at the first key of each row.
    tile = load_tile(k[0], lo, k[2], columns, keys, D, True).to(tl.float32)
    shift = tl.sum(q_dot.to(tl.float32) * tile, 1)
    tile = load_tile(k[0] + k[1], lo, k[2], columns, keys, D, True).to(tl.float32)
    shift = (shift + tl.sum(q_tile.to(tl.float32) * tile, 1)) * scale

    sums = ()
    for _ in tl.static_range(SLABS):
        zeros = tl.zeros((HELD, WIDTH // SLABS), tl.float32)
        sums += ((zeros, zeros),)
    zeros = tl.zeros((HELD,), tl.float32)
    # -1e30 and not -inf: a row may see nothing of the first tiles.
    state = zeros - 1e30, zeros, zeros, sums
    held = q_tile, q_dot, shift, lo, hi
    start, before, whole, masked = key_tiles(lo, hi, MODE, STREAMED)
    start += tl.arange(0, STREAMED)
    for t in range(before, before + whole):
        tile_rows = start + t * STREAMED
        state = _forward_tile(
            state, held, k, v, tile_rows, keys, scale, D, WIDTH, MODE, SLABS, PRECISION, False
        )
    for t in range(masked):
        tile_rows = start + (t + tl.where(t < before, 0, whole)) * STREAMED
        state = _forward_tile(
            state, held, k, v, tile_rows, keys, scale, D, WIDTH, MODE, SLABS, PRECISION, True
        )
    m, total, shifted_mu, sums = state

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    shifted_mu = shifted_mu / total
    inside = rows < length
    statistics = (batch.to(tl.int64) * heads + head) * length + rows
    log_sum = (m + tl.log2(total)) / LOG2E
    tl.store(lse + statistics, tl.where(empty, -float("inf"), log_sum), inside)
    tl.store(mu + statistics, tl.where(empty, 0.0, shifted_mu + shift), inside)

    SLAB: tl.constexpr = WIDTH // SLABS
    for slab in tl.static_range(SLABS):
        columns = tl.arange(0, SLAB) + slab * SLAB
        o, o_dot = sums[slab]
        o = o / total[:, None]
        o_dot = o_dot / total[:, None] - shifted_mu[:, None] * o
        store_pair(out, o, o_dot, batch, head, rows, columns, length, D)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor | None,
    key_spans: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dual attention.

    Args:
        q: [2, B, H, Sq, D]; like k and v read as it lies if the last dimension is contiguous.
        k, v: [2, B, Hkv, Sk, D] in q's dtype.
        spans: [B or 1, Sq, 2] int32, the keys [from, to) that a query sees; None: all, or with
            `causal` the keys j <= i.
        key_spans: the same seen from the keys; the backward needs it.
        scale: of the logits.

    Returns:
        out [2, B, H, Sq, D] in q's dtype and the memory order [2, B, Sq, H, D]; lse and mu
        [B, H, Sq] fp32: log of the sum of exp(S), and the mean of S_dot. A row that sees no key
        has out 0, lse -inf, mu 0.
    """
    q, k, v = rows_contiguous(q, k, v)
    _, batch, heads, length, width = q.shape
    out = q.new_empty(2, batch, length, heads, width).transpose(2, 3)
    lse, mu = (q.new_empty(batch, heads, length, dtype=torch.float32) for _ in range(2))
    if lse.numel() == 0:
        return out, lse, mu
    tile = pick("forward", q)
    unit, steps = strides(q, k, v)
    _forward[triton.cdiv(length, tile.held), heads, batch](
        q,
        k,
        v,
        out,
        lse,
        mu,
        *spans_and_stride(spans),
        *steps,
        length,
        k.shape[3],
        scale,
        SLABS=tile.slabs,
        **constants(q, k, spans, causal, unit, tile),
    )
    return out, lse, mu
