"""Dual attention without the S x S matrices, forward.

A program holds a block of queries and goes through its keys tile by tile, with the usual running
maximum m and sum l of e = exp(S - m), and beside the sum of e V those of the tangent:
    O = sum e V / l        mu = sum e S_dot / l        O_dot = sum e ((S_dot - mu) V + V_dot) / l
mu is a running mean: where a tile moves it by delta, what is summed of e (S_dot - mu) V moves by
-delta sum e V. So nothing of the size of mu cancels, however far S_dot is from 0 or however large
it is at the one key that a row attends to, and what is rounded to 16 bits is small. 6 matmuls a
tile.

S and S_dot stay products, without the scale, in every statistic: then S - m is exactly 0 at the
largest S, and S_dot - mu at the only key with a weight. Times the scale first, that zero would be
the rounding of a number as large as S.
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
    place,
    plane,
    positive_scale,
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
    """The keys `rows` (those that exist are below `keys`) taken into the state: m, l, mu, the sum
    of e (S_dot - mu) that rounding left, and by slab of columns those of O and O_dot."""
    m, total, mu, left, sums = state
    q, q_dot, lo, hi = held
    k, k_half, k_row = k
    v, v_half, v_row = v
    columns = tl.arange(0, WIDTH)
    tile = tl.trans(load_tile(k, rows, k_row, columns, keys, D, MASKED))
    s = tl.dot(q, tile, input_precision=PRECISION)
    s_dot = tl.dot(q_dot, tile, input_precision=PRECISION)
    tile = tl.trans(load_tile(k + k_half, rows, k_row, columns, keys, D, MASKED))
    s_dot = tl.dot(q, tile, s_dot, input_precision=PRECISION)
    if MASKED:
        visible = visible_keys(rows[None, :], lo[:, None], hi[:, None], MODE)
        s = tl.where(visible, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1))
    e = tl.exp2((s - top[:, None]) * (scale * LOG2E))
    old = tl.exp2((m - top) * (scale * LOG2E))
    kept = total * old
    added = tl.sum(e, 1)
    total = kept + added
    # Relative to the mean so far, unless heavier keys have just come: the distance between a mean
    # without weight and a far S_dot would be rounded.
    base = tl.where(kept < added, 0.0, mu)
    s_dot -= base[:, None]
    moment = tl.sum(e * s_dot, 1)
    # Where a row has seen a key, e is 1 at its largest S.
    mean = base + (kept * (mu - base) + moment) / tl.maximum(total, 1.0)
    delta = mean - mu
    step = mean - base
    left = left * old - kept * delta + (moment - added * step)
    delta *= scale
    # The difference first: times the scale, fused into one rounding, it would not be 0 at `step`.
    w = (e * scale * (s_dot - step[:, None])).to(q.dtype)
    e = e.to(q.dtype)
    SLAB: tl.constexpr = WIDTH // SLABS
    new = ()
    for slab in tl.static_range(SLABS):
        columns = tl.arange(0, SLAB) + slab * SLAB
        out, out_dot = sums[slab]
        out *= old[:, None]
        out_dot = out_dot * old[:, None] - out * delta[:, None]
        tile = load_tile(v, rows, v_row, columns, keys, D, MASKED)
        out = tl.dot(e, tile, out, input_precision=PRECISION)
        out_dot = tl.dot(w, tile, out_dot, input_precision=PRECISION)
        tile = load_tile(v + v_half, rows, v_row, columns, keys, D, MASKED)
        out_dot = tl.dot(e, tile, out_dot, input_precision=PRECISION)
        new += ((out, out_dot),)
    return top, total, mean, left, new


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
    batches,
    heads,
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
    block, head, batch = place(heads, batches)
    if MODE == CAUSAL:  # the longest first
        block = tl.cdiv(length, HELD) - 1 - block
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

    sums = ()
    for _ in tl.static_range(SLABS):
        zeros = tl.zeros((HELD, WIDTH // SLABS), tl.float32)
        sums += ((zeros, zeros),)
    zeros = tl.zeros((HELD,), tl.float32)
    # Not -inf: a row may see nothing of the first tiles.
    state = zeros - 3e38, zeros, zeros, zeros, sums
    held = q_tile, q_dot, lo, hi
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
    m, total, mean, left, sums = state

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    left = left / total
    inside = rows < length
    statistics = (batch.to(tl.int64) * heads + head) * length + rows
    lse_half = batches.to(tl.int64) * heads * length
    tl.store(lse + statistics, tl.where(empty, -float("inf"), m), inside)
    tl.store(lse + lse_half + statistics, tl.where(empty, -float("inf"), tl.log2(total)), inside)
    tl.store(mu + statistics, mean + left, inside)
    left *= scale

    SLAB: tl.constexpr = WIDTH // SLABS
    for slab in tl.static_range(SLABS):
        columns = tl.arange(0, SLAB) + slab * SLAB
        o, o_dot = sums[slab]
        o = o / total[:, None]
        o_dot = o_dot / total[:, None] - left[:, None] * o
        store_pair(out, o, o_dot, batch, head, batches, heads, rows, columns, length, D)


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
        out [2, B, H, Sq, D] in q's dtype and the memory order [2, B, Sq, H, D]; in fp32 lse
        [2, B, H, Sq], the largest product q k of a row and log2 of the sum of exp(S) over that of
        the largest, and mu [B, H, Sq], the mean of S_dot before the scale. A row that sees no key
        has out 0, lse -inf, mu 0.
    """
    q, _, scale = positive_scale(q, scale)
    q, k, v = rows_contiguous(q, k, v)
    _, batch, heads, length, width = q.shape
    out = q.new_empty(2, batch, length, heads, width).transpose(2, 3)
    lse = q.new_empty(2, batch, heads, length, dtype=torch.float32)
    mu = q.new_empty(batch, heads, length, dtype=torch.float32)
    if mu.numel() == 0:
        return out, lse, mu
    tile = pick("forward", q)
    unit, steps = strides(q, k, v)
    _forward[(triton.cdiv(length, tile.held) * batch * heads,)](
        q,
        k,
        v,
        out,
        lse,
        mu,
        *spans_and_stride(spans),
        *steps,
        batch,
        heads,
        length,
        k.shape[3],
        scale,
        SLABS=tile.slabs,
        **constants(q, k, spans, causal, unit, tile),
    )
    return out, lse, mu
