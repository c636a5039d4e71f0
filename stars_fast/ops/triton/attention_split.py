"""Backward of the dual attention in kernels that each compute something again.

One or two kernels whose programs hold keys and go through the queries of all heads that share them;
one whose programs hold queries. So no two programs add to one number, and the bits are the same
each time; instead of 15 products a tile 21 (heads up to 64 wide) or 24 are computed. The kernel
that holds keys can add to the gradient of the queries too (`attention_fused.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stars_fast.ops.triton.attention_parts import (
    CAUSAL,
    LOG2E,
    SPANS,
    VARYING,
    Backward,
    constants,
    key_tiles,
    load_tile,
    place,
    plane,
    span,
    spans_and_stride,
    store_pair,
    strides,
    visible_keys,
)
from stars_fast.ops.triton.tiles import JOINT_WIDTH, pick


@triton.jit
def add_rows(sums, tile, rows, columns, D: tl.constexpr):
    """Adds a tile to rows of `sums` [.., D], in whatever order programs come."""
    at = sums + rows.to(tl.int64)[:, None] * D + columns[None, :]
    if D < 16 or triton.next_power_of_2(D) != D:
        tl.atomic_add(at, tile, (columns < D)[None, :], sem="relaxed")
    else:  # a mask is a branch around each addition
        tl.atomic_add(at, tile, sem="relaxed")


@triton.jit(do_not_specialize=VARYING)
def _backward_keys(
    q,
    k,
    v,
    grad,
    lse,
    mu,
    sums,
    k_grad,
    v_grad,
    q_sums,
    spans,
    span_batch,
    key_spans,
    key_span_batch,
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
    grad_half,
    grad_batch,
    grad_head,
    grad_row,
    batches,
    heads,
    length,
    keys,
    scale,
    DO_K: tl.constexpr,
    DO_V: tl.constexpr,
    DO_Q: tl.constexpr,
    EXACT: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    MODE: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    HELD: tl.constexpr,
    STREAMED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gradients of a block of keys, of values, or both; all tiles are keys x queries. With DO_Q
    what the block gives to those of the queries, without the scale, is added to q_sums
    [2, B, H, Sq + STREAMED, D]."""
    block, head, batch = place(heads, batches)
    rows = block * HELD + tl.arange(0, HELD)
    columns = tl.arange(0, WIDTH)
    k = plane(k, batch, head, k_batch, k_head, UNIT)
    k_tile = load_tile(k, rows, k_row * UNIT, columns, keys, D, True)
    k += k_half.to(tl.int64) * UNIT
    k_dot = load_tile(k, rows, k_row * UNIT, columns, keys, D, True)
    if DO_K:
        v = plane(v, batch, head, v_batch, v_head, UNIT)
        v_tile = load_tile(v, rows, v_row * UNIT, columns, keys, D, True)
        v += v_half.to(tl.int64) * UNIT
        v_dot = load_tile(v, rows, v_row * UNIT, columns, keys, D, True)
        k_bar = tl.zeros((HELD, WIDTH), tl.float32)
        k_dot_bar = tl.zeros((HELD, WIDTH), tl.float32)
    if DO_V:
        v_bar = tl.zeros((HELD, WIDTH), tl.float32)
        v_dot_bar = tl.zeros((HELD, WIDTH), tl.float32)

    first = 0
    last = length
    seen_from = tl.zeros_like(rows)
    if MODE == CAUSAL:
        first = block * HELD
        seen_from = rows
    if MODE == SPANS:
        seen_from, seen_to = span((key_spans, key_span_batch), batch, rows, keys, length, MODE)
        first = tl.min(seen_from, 0)
        last = tl.max(seen_to, 0)
    # Keys past the last, whose weights may be infinite, add to queries: so nothing sees them.
    seen_from = tl.where(rows < keys, seen_from, 1 << 30)
    q_half = q_half.to(tl.int64) * UNIT
    grad_half = grad_half.to(tl.int64) * UNIT
    sums_half = batches.to(tl.int64) * heads * GROUP * length
    for member in range(GROUP):
        query_head = head * GROUP + member
        q_plane = plane(q, batch, query_head, q_batch, q_head, UNIT)
        if DO_Q:
            plane_size = (length + STREAMED).to(tl.int64) * D
            q_plane_sums = q_sums + (batch * heads * GROUP + query_head) * plane_size
            q_sums_half = batches * heads * GROUP * plane_size
        grad_plane = plane(grad, batch, query_head, grad_batch, grad_head, UNIT)
        statistics = (batch.to(tl.int64) * heads * GROUP + query_head) * length
        for start in range(first, last, STREAMED):
            queries = start + tl.arange(0, STREAMED)
            # Rows past the last are 0 in q, g, b and the sums: whatever P, they add 0.
            inside = queries < length
            tile = load_tile(q_plane, queries, q_row * UNIT, columns, length, D, True)
            tile_dot = load_tile(q_plane + q_half, queries, q_row * UNIT, columns, length, D, True)
            s = tl.dot(k_tile, tl.trans(tile), input_precision=PRECISION)
            s_dot = tl.dot(k_dot, tl.trans(tile), input_precision=PRECISION)
            s_dot = tl.dot(k_tile, tl.trans(tile_dot), s_dot, input_precision=PRECISION)
            top = tl.load(lse + statistics + queries, inside, 0.0)
            log_sum = tl.load(lse + sums_half + statistics + queries, inside, 0.0)
            mu_row = tl.load(mu + statistics + queries, inside, 0.0)
            p = tl.exp2((s - top[None, :]) * (scale * LOG2E) - log_sum[None, :])
            if MODE != SPANS:
                if DO_Q or MODE == CAUSAL:
                    p = tl.where(queries[None, :] >= seen_from[:, None], p, 0.0)
            elif EXACT:
                visible = queries[None, :] >= seen_from[:, None]
                p = tl.where(visible & (queries[None, :] < seen_to[:, None]), p, 0.0)
            else:
                lo, hi = span((spans, span_batch), batch, queries, length, keys, MODE)
                p = tl.where(visible_keys(rows[:, None], lo[None, :], hi[None, :], MODE), p, 0.0)
            p_dot = p * ((s_dot - mu_row[None, :]) * scale)
            g = load_tile(grad_plane, queries, grad_row * UNIT, columns, length, D, True)
            b = load_tile(
                grad_plane + grad_half, queries, grad_row * UNIT, columns, length, D, True
            )
            if DO_V:
                weights = p.to(q.dtype.element_ty)
                v_dot_bar = tl.dot(weights, b, v_dot_bar, input_precision=PRECISION)
                v_bar = tl.dot(weights, g, v_bar, input_precision=PRECISION)
                weights = p_dot.to(q.dtype.element_ty)
                v_bar = tl.dot(weights, b, v_bar, input_precision=PRECISION)
            if DO_K:
                d = tl.load(sums + statistics + queries, inside, 0.0)
                d_dot = tl.load(sums + sums_half + statistics + queries, inside, 0.0)
                e = tl.dot(v_tile, tl.trans(b), input_precision=PRECISION) - d[None, :]
                e_dot = tl.dot(v_tile, tl.trans(g), input_precision=PRECISION)
                e_dot = tl.dot(v_dot, tl.trans(b), e_dot, input_precision=PRECISION)
                s_bar = p_dot * e + p * (e_dot - d_dot[None, :])
                s_dot_bar = (p * e).to(q.dtype.element_ty)
                k_dot_bar = tl.dot(s_dot_bar, tile, k_dot_bar, input_precision=PRECISION)
                k_bar = tl.dot(s_dot_bar, tile_dot, k_bar, input_precision=PRECISION)
                s_bar = s_bar.to(q.dtype.element_ty)
                k_bar = tl.dot(s_bar, tile, k_bar, input_precision=PRECISION)
            if DO_Q:
                part = tl.dot(tl.trans(s_dot_bar), k_tile, input_precision=PRECISION)
                add_rows(q_plane_sums + q_sums_half, part, queries, columns, D)
                part = tl.dot(tl.trans(s_dot_bar), k_dot, input_precision=PRECISION)
                part = tl.dot(tl.trans(s_bar), k_tile, part, input_precision=PRECISION)
                add_rows(q_plane_sums, part, queries, columns, D)

    if DO_K:
        k_bar *= scale
        k_dot_bar *= scale
        store_pair(
            k_grad, k_bar, k_dot_bar, batch, head, batches, heads, rows, columns, keys, D
        )  # fmt: skip
    if DO_V:
        store_pair(
            v_grad, v_bar, v_dot_bar, batch, head, batches, heads, rows, columns, keys, D
        )  # fmt: skip


@triton.jit
def _queries_tile(
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
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds what the keys `rows` give to q_bar and q_dot_bar."""
    q_bar, q_dot_bar = state
    q, q_dot, g, b, top, log_sum, mu, d, d_dot, lo, hi = held
    k, k_half, k_row = k
    v, v_half, v_row = v
    columns = tl.arange(0, WIDTH)
    k_tile = load_tile(k, rows, k_row, columns, keys, D, MASKED)
    k_dot = load_tile(k + k_half, rows, k_row, columns, keys, D, MASKED)
    s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    s_dot = tl.dot(q_dot, tl.trans(k_tile), input_precision=PRECISION)
    s_dot = tl.dot(q, tl.trans(k_dot), s_dot, input_precision=PRECISION)
    p = tl.exp2((s - top[:, None]) * (scale * LOG2E) - log_sum[:, None])
    if MASKED:
        p = tl.where(visible_keys(rows[None, :], lo[:, None], hi[:, None], MODE), p, 0.0)
    p_dot = p * ((s_dot - mu[:, None]) * scale)
    tile = tl.trans(load_tile(v, rows, v_row, columns, keys, D, MASKED))
    e = tl.dot(b, tile, input_precision=PRECISION) - d[:, None]
    e_dot = tl.dot(g, tile, input_precision=PRECISION)
    tile = tl.trans(load_tile(v + v_half, rows, v_row, columns, keys, D, MASKED))
    e_dot = tl.dot(b, tile, e_dot, input_precision=PRECISION)
    s_bar = (p_dot * e + p * (e_dot - d_dot[:, None])).to(q.dtype)
    s_dot_bar = (p * e).to(q.dtype)
    q_dot_bar = tl.dot(s_dot_bar, k_tile, q_dot_bar, input_precision=PRECISION)
    q_bar = tl.dot(s_dot_bar, k_dot, q_bar, input_precision=PRECISION)
    q_bar = tl.dot(s_bar, k_tile, q_bar, input_precision=PRECISION)
    return q_bar, q_dot_bar


@triton.jit(do_not_specialize=VARYING)
def _backward_queries(
    q,
    k,
    v,
    grad,
    lse,
    mu,
    sums,
    q_grad,
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
    grad_half,
    grad_batch,
    grad_head,
    grad_row,
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
    WIDTH: tl.constexpr,
):
    """Gradients of a block of queries."""
    block, head, batch = place(heads, batches)
    if MODE == CAUSAL:  # the longest first
        block = tl.cdiv(length, HELD) - 1 - block
    rows = block * HELD + tl.arange(0, HELD)
    columns = tl.arange(0, WIDTH)
    inside = rows < length
    q = plane(q, batch, head, q_batch, q_head, UNIT)
    q_tile = load_tile(q, rows, q_row * UNIT, columns, length, D, True)
    q += q_half.to(tl.int64) * UNIT
    q_dot = load_tile(q, rows, q_row * UNIT, columns, length, D, True)
    grad = plane(grad, batch, head, grad_batch, grad_head, UNIT)
    g = load_tile(grad, rows, grad_row * UNIT, columns, length, D, True)
    grad += grad_half.to(tl.int64) * UNIT
    b = load_tile(grad, rows, grad_row * UNIT, columns, length, D, True)
    statistics = (batch.to(tl.int64) * heads + head) * length + rows
    sums_half = batches.to(tl.int64) * heads * length
    top = tl.load(lse + statistics, inside, 0.0)
    log_sum = tl.load(lse + sums_half + statistics, inside, 0.0)
    mu_rows = tl.load(mu + statistics, inside, 0.0)
    d = tl.load(sums + statistics, inside, 0.0)
    d_dot = tl.load(sums + sums_half + statistics, inside, 0.0)
    lo, hi = span((spans, span_batch), batch, rows, length, keys, MODE)
    k = plane(k, batch, head // GROUP, k_batch, k_head, UNIT)
    v = plane(v, batch, head // GROUP, v_batch, v_head, UNIT)
    k = k, k_half.to(tl.int64) * UNIT, k_row * UNIT
    v = v, v_half.to(tl.int64) * UNIT, v_row * UNIT

    zeros = tl.zeros((HELD, WIDTH), tl.float32)
    state = zeros, zeros
    held = q_tile, q_dot, g, b, top, log_sum, mu_rows, d, d_dot, lo, hi
    start, before, whole, masked = key_tiles(lo, hi, MODE, STREAMED)
    start += tl.arange(0, STREAMED)
    for t in range(before, before + whole):
        tile_rows = start + t * STREAMED
        state = _queries_tile(
            state, held, k, v, tile_rows, keys, scale, D, WIDTH, MODE, PRECISION, False
        )
    for t in range(masked):
        tile_rows = start + (t + tl.where(t < before, 0, whole)) * STREAMED
        state = _queries_tile(
            state, held, k, v, tile_rows, keys, scale, D, WIDTH, MODE, PRECISION, True
        )
    q_bar, q_dot_bar = state
    q_bar *= scale
    q_dot_bar *= scale
    store_pair(
        q_grad, q_bar, q_dot_bar, batch, head, batches, heads, rows, columns, length, D
    )  # fmt: skip


# Which gradients the kernels that hold keys compute, by their name in `tiles.py`.
_OUTPUTS = {"keys": "kv", "keys_v": "v", "keys_k": "k", "fused": "kvq", "fused_k": "kq"}


def launch_keys(
    kernel: str, given: Backward, k_grad: Tensor, v_grad: Tensor, q_sums: Tensor | None = None
) -> None:
    """The kernel of this name. Fills k_grad or v_grad, [2, B, Sk, Hkv, D], or both, and adds to
    q_sums (see the kernel)."""
    tile, outputs = pick(kernel, given.q), _OUTPUTS[kernel]
    batch, kv_heads, keys = given.k.shape[1:4]
    unit, steps = strides(given.q, given.k, given.v, given.grad)
    _backward_keys[(triton.cdiv(keys, tile.held) * batch * kv_heads,)](
        *_inputs(given),
        k_grad,
        v_grad,
        q_sums,
        *spans_and_stride(given.spans),
        *spans_and_stride(given.key_spans),
        *steps,
        batch,
        kv_heads,
        given.q.shape[3],
        keys,
        given.scale,
        DO_K="k" in outputs,
        DO_V="v" in outputs,
        DO_Q="q" in outputs,
        EXACT=given.exact and given.spans is not None,
        **constants(given.q, given.k, given.spans, given.causal, unit, tile),
    )


def _inputs(given: Backward) -> tuple[Tensor, ...]:
    return given.q, given.k, given.v, given.grad, given.lse, given.mu, given.sums


def split(given: Backward, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> None:
    """Fills the gradients, [2, B, S, heads, D] in q's dtype."""
    q, k = given.q, given.k
    _, batch, heads, length, width = q.shape
    for kernel in ("keys",) if width <= JOINT_WIDTH else ("keys_v", "keys_k"):
        launch_keys(kernel, given, k_grad, v_grad)
    tile = pick("queries", q)
    unit, steps = strides(q, k, given.v, given.grad)
    _backward_queries[(triton.cdiv(length, tile.held) * batch * heads,)](
        *_inputs(given),
        q_grad,
        *spans_and_stride(given.spans),
        *steps,
        batch,
        heads,
        length,
        k.shape[3],
        given.scale,
        **constants(q, k, given.spans, given.causal, unit, tile),
    )
