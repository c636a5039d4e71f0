"""Backward of the dual attention in one kernel of 15 products for sm_90, in Gluon.

It has never run on a GPU: it is compiled, and what it computes and how its warps wait for each
other is tested in an emulator (`tests/ops/triton_kernels/gluon_emulator.py`).

A program holds a block of keys and goes through the blocks of queries that see them, for all heads
that share the keys. Nothing is computed twice, because the work on a tile is split by side, between
two groups of four warps, each with its own part of the registers:
    values: S, S_dot (3 products), P and P_dot; V_bar, V_dot_bar (3), Q_dot_bar (1)
    keys:   E, E_dot (3), dS and dS_dot;        Q_bar (2), K_bar, K_dot_bar (3)
One more warp copies tiles ahead. The gradient of a block of queries is the sum of what all its keys
give, by atomic additions in fp32: its last bits change from run to run.

Who waits for whom, by mbarriers in shared memory. Waits name the phase of the barrier that they
wait for, and every barrier is completed once for each tile, so no phase is passed over:
    HELD_READY      the copies of k and v have arrived
    READY [stage]   those of q and of the cotangents have arrived
    FREE [stage]    both sides have read them: two arrivals
    P_READY         the value side has written P, P_dot
    DS_READY        the key side has read P, P_dot and written dS, dS_dot
Two handshakes are enough. P is written anew only after DS_READY of the tile before, so after it was
read. dS is written anew only after the next P_READY, which the value side signals after its
Q_dot_bar of the tile before; the key side's own products on dS are waited for in its turn.

Products read shared memory by another way than stores write it (the asynchronous proxy), so a fence
stands between the two, before the barrier that tells of the store. The compiler synchronises the
four warps of a side before it lets one of them arrive.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stars_fast.ops.triton import attention_parts
from stars_fast.ops.triton.attention_parts import (
    CAUSAL,
    FULL,
    LOG2E,
    SPANS,
    VARYING,
    Backward,
    spans_and_stride,
)

place = gluon.jit(attention_parts.place.fn)
# Named anew in Triton 3.8.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

BLOCK = gl.constexpr(64)  # of keys, and of queries
STAGES = gl.constexpr(2)  # tiles of queries in shared memory

# Barriers, and how many they are.
HELD_READY = gl.constexpr(0)
P_READY = gl.constexpr(1)
DS_READY = gl.constexpr(2)
READY = gl.constexpr(3)
FREE = gl.constexpr(5)
BARRIERS = gl.constexpr(7)

# Four warps a side, and one that copies, for which the hardware sets four apart: 168 registers a
# thread when they start, of which the one that copies gives most to the others.
WARPS = gl.constexpr(4)
REGISTERS = 168
WORKER_WARPS = gl.constexpr([4, 1])
WORKER_REGISTERS = gl.constexpr([240, 24])


@gluon.jit
def _matrix(tiles, index):
    """The tile [1, 1, 1, rows, columns] as a matrix."""
    shape: gl.constexpr = tiles.shape
    return tiles.index(index).reshape([shape[4], shape[5]])


@gluon.jit
def _copy_pair(x, batch, head, row, barrier, tiles, index):
    """Rows of both halves of x; 0 past its last row and column."""
    copy_in(x, [0, batch, head, row, 0], barrier, tiles.index(index))
    copy_in(x, [1, batch, head, row, 0], barrier, tiles.index(index + 1))


@gluon.jit
def _store_pair(x, value, dot, batch, head, row, tiles, index):
    """Rows of both halves of x, by way of two tiles that nobody reads any more. Rows and columns
    that x has not are left out."""
    _matrix(tiles, index).store(value.to(x.dtype))
    _matrix(tiles, index + 1).store(dot.to(x.dtype))
    fence_async_shared()
    copy_out(x, [0, batch, head, row, 0], tiles.index(index))
    copy_out(x, [1, batch, head, row, 0], tiles.index(index + 1))
    tma.store_wait(0)


@gluon.jit
def _add(x, tile, rows, columns, row_stride, length, D: gl.constexpr, WIDTH: gl.constexpr):
    """Adds a tile to the rows of x, columns contiguous."""
    x += rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
    inside = (rows < length)[:, None]
    if D != WIDTH:
        inside = inside & (columns < D)[None, :]
    gl.atomic_add(x, tile, inside, sem="relaxed")


@gluon.jit
def _copies(inputs, tiles, barriers, where, GROUP: gl.constexpr):
    """The warp that copies: keys and values once, then the tiles of queries as they get free."""
    q, k, v, grad = inputs
    held, q_tiles, g_tiles = tiles
    batch, head, row, first, steps = where
    PAIR: gl.constexpr = 2 * 2 * BLOCK * held.shape[5]  # bytes of two tiles
    barrier = barriers.index(HELD_READY)
    mbarrier.expect(barrier, 2 * PAIR)
    _copy_pair(k, batch, head, row, barrier, held, 0)
    _copy_pair(v, batch, head, row, barrier, held, 2)
    n = 0
    for member in range(GROUP):
        query_head = head * GROUP + member
        for step in range(steps):
            start = first + step * BLOCK
            stage = n % STAGES
            # Of a barrier that nobody has arrived at, the phase before the first counts as over.
            mbarrier.wait(barriers.index(FREE + stage), (n // STAGES + 1) & 1)
            barrier = barriers.index(READY + stage)
            mbarrier.expect(barrier, 2 * PAIR)
            _copy_pair(q, batch, query_head, start, barrier, q_tiles, 2 * stage)
            _copy_pair(grad, batch, query_head, start, barrier, g_tiles, 2 * stage)
            n += 1


@gluon.jit
def _value_side(
    rows_of,
    grads,
    tiles,
    barriers,
    where,
    sizes,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    MODE: gl.constexpr,
):
    tops, log_sums, mu, spans, span_batch = rows_of
    q_dot_sum, v_grad = grads
    held, q_tiles, g_tiles, p_tiles, ds_tiles = tiles
    batch, head, row, first, steps = where
    heads, length, keys, scale = sizes
    dtype: gl.constexpr = held.dtype
    WIDTH: gl.constexpr = held.shape[5]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    key = row + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
    rows = gl.arange(0, BLOCK, gl.SliceLayout(1, SUMS))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
    no_scores = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
    no_sums = gl.zeros([BLOCK, WIDTH], gl.float32, SUMS)
    v_bar = gl.zeros([BLOCK, WIDTH], gl.float32, SUMS)
    v_dot_bar = gl.zeros([BLOCK, WIDTH], gl.float32, SUMS)
    mbarrier.wait(barriers.index(HELD_READY), 0)
    n = 0
    for member in range(GROUP):
        query_head = head * GROUP + member
        statistics = (batch.to(gl.int64) * heads * GROUP + query_head) * length
        for step in range(steps):
            start = first + step * BLOCK
            stage = n % STAGES
            # 0, of which the compiler knows nothing: else it keeps what addresses each part of each
            # tile in registers that the sums need.
            zero = step >> 30
            k = _matrix(held, zero)
            k_dot = _matrix(held, zero + 1)
            q = _matrix(q_tiles, 2 * stage)
            q_dot = _matrix(q_tiles, 2 * stage + 1)
            g = _matrix(g_tiles, 2 * stage)
            b = _matrix(g_tiles, 2 * stage + 1)
            queries = start + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
            # Rows past the last are 0 in q, g, b and the sums: whatever P, they add 0.
            inside = queries < length
            at = statistics + zero + queries
            top = gl.load(tops + at, inside, 0.0)
            log_sum = gl.load(log_sums + at, inside, 0.0)
            mu_row = gl.load(mu + at, inside, 0.0)
            if MODE == SPANS:
                span = spans + batch.to(gl.int64) * span_batch + 2 * queries
                lo = gl.load(span, inside, 0)
                hi = gl.minimum(gl.load(span + 1, inside, 0), keys)
            if MODE == CAUSAL:
                hi = gl.minimum(queries + 1, keys)

            mbarrier.wait(barriers.index(READY + stage), (n // STAGES) & 1)
            s = warpgroup_mma(q, k.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            s_dot = warpgroup_mma(q_dot, k.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            s_dot = warpgroup_mma(q, k_dot.permute([1, 0]), s_dot, is_async=True)
            s = warpgroup_mma_wait(2, [s])
            p = gl.exp2((s - top[:, None]) * (scale * LOG2E) - log_sum[:, None])
            if MODE == FULL:
                p = gl.where((key < keys)[None, :], p, 0.0)
            else:
                visible = key[None, :] < hi[:, None]
                if MODE == SPANS:
                    visible = visible & (key[None, :] >= lo[:, None])
                p = gl.where(visible, p, 0.0)
            s_dot = warpgroup_mma_wait(0, [s_dot])
            p_dot = p * ((s_dot - mu_row[:, None]) * scale)
            p_tiles.index(zero).store(p.to(dtype))
            p_tiles.index(zero + 1).store(p_dot.to(dtype))
            fence_async_shared()
            mbarrier.arrive(barriers.index(P_READY), count=1)

            weights = p_tiles.index(zero).permute([1, 0])
            v_dot_bar = warpgroup_mma(weights, b, v_dot_bar, is_async=True)
            v_bar = warpgroup_mma(weights, g, v_bar, is_async=True)
            weights = p_tiles.index(zero + 1).permute([1, 0])
            v_bar = warpgroup_mma(weights, b, v_bar, is_async=True)
            mbarrier.wait(barriers.index(DS_READY), n & 1)
            q_dot_bar = warpgroup_mma(
                ds_tiles.index(zero), k, no_sums, use_acc=False, is_async=True
            )
            v_bar, v_dot_bar, q_dot_bar = warpgroup_mma_wait(0, [v_bar, v_dot_bar, q_dot_bar])
            mbarrier.arrive(barriers.index(FREE + stage), count=1)
            at = batch.to(gl.int64) * heads * GROUP * length + query_head
            row_stride = heads * GROUP * D
            _add(q_dot_sum + at * D, q_dot_bar, start + rows, columns, row_stride, length, D, WIDTH)
            n += 1
    # With the last DS_READY the key side has read v and v_dot for the last time.
    _store_pair(v_grad, v_bar, v_dot_bar, batch, head, row, held, 2)


@gluon.jit
def _key_side(
    sums,
    grads,
    tiles,
    barriers,
    where,
    sizes,
    D: gl.constexpr,
    GROUP: gl.constexpr,
):
    q_sum, k_grad = grads
    held, q_tiles, g_tiles, p_tiles, ds_tiles = tiles
    batch, head, row, first, steps = where
    heads, length, _, scale = sizes
    dtype: gl.constexpr = held.dtype
    WIDTH: gl.constexpr = held.shape[5]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    rows = gl.arange(0, BLOCK, gl.SliceLayout(1, SUMS))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
    no_scores = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
    no_sums = gl.zeros([BLOCK, WIDTH], gl.float32, SUMS)
    k_bar = gl.zeros([BLOCK, WIDTH], gl.float32, SUMS)
    k_dot_bar = gl.zeros([BLOCK, WIDTH], gl.float32, SUMS)
    mbarrier.wait(barriers.index(HELD_READY), 0)
    n = 0
    for member in range(GROUP):
        query_head = head * GROUP + member
        statistics = (batch.to(gl.int64) * heads * GROUP + query_head) * length
        for step in range(steps):
            start = first + step * BLOCK
            stage = n % STAGES
            zero = step >> 30  # as on the value side
            k = _matrix(held, zero)
            k_dot = _matrix(held, zero + 1)
            v = _matrix(held, zero + 2)
            v_dot = _matrix(held, zero + 3)
            q = _matrix(q_tiles, 2 * stage)
            q_dot = _matrix(q_tiles, 2 * stage + 1)
            g = _matrix(g_tiles, 2 * stage)
            b = _matrix(g_tiles, 2 * stage + 1)
            queries = start + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
            inside = queries < length
            at = statistics + zero + queries
            d = gl.load(sums[0] + at, inside, 0.0)
            d_dot = gl.load(sums[1] + at, inside, 0.0)

            mbarrier.wait(barriers.index(READY + stage), (n // STAGES) & 1)
            e = warpgroup_mma(b, v.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            e_dot = warpgroup_mma(g, v.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            e_dot = warpgroup_mma(b, v_dot.permute([1, 0]), e_dot, is_async=True)
            e, e_dot = warpgroup_mma_wait(0, [e, e_dot])
            e = e - d[:, None]
            mbarrier.wait(barriers.index(P_READY), n & 1)
            p = p_tiles.index(zero).load(SCORES).to(gl.float32)
            p_dot = p_tiles.index(zero + 1).load(SCORES).to(gl.float32)
            ds_tiles.index(zero).store((p * e).to(dtype))
            ds_tiles.index(zero + 1).store((p_dot * e + p * (e_dot - d_dot[:, None])).to(dtype))
            fence_async_shared()
            mbarrier.arrive(barriers.index(DS_READY), count=1)

            ds = ds_tiles.index(zero)
            ds_dot = ds_tiles.index(zero + 1)
            q_bar = warpgroup_mma(ds_dot, k, no_sums, use_acc=False, is_async=True)
            q_bar = warpgroup_mma(ds, k_dot, q_bar, is_async=True)
            k_dot_bar = warpgroup_mma(ds.permute([1, 0]), q, k_dot_bar, is_async=True)
            k_bar = warpgroup_mma(ds.permute([1, 0]), q_dot, k_bar, is_async=True)
            k_bar = warpgroup_mma(ds_dot.permute([1, 0]), q, k_bar, is_async=True)
            q_bar = warpgroup_mma_wait(3, [q_bar])
            at = batch.to(gl.int64) * heads * GROUP * length + query_head
            row_stride = heads * GROUP * D
            _add(q_sum + at * D, q_bar, start + rows, columns, row_stride, length, D, WIDTH)
            k_bar, k_dot_bar = warpgroup_mma_wait(0, [k_bar, k_dot_bar])
            mbarrier.arrive(barriers.index(FREE + stage), count=1)
            n += 1
    # With the last P_READY the value side has read q for the last time, and no copy is under way.
    _store_pair(k_grad, k_bar * scale, k_dot_bar * scale, batch, head, row, q_tiles, 0)


@gluon.jit(
    do_not_specialize=VARYING,
    # Of halves of tensors, whose address is a multiple of 16 bytes or not by the length.
    do_not_specialize_on_alignment=["tops", "log_sums", "mu", "d", "d_dot"],
)
def _backward(
    q,
    k,
    v,
    grad,
    tops,
    log_sums,
    mu,
    d,
    d_dot,
    q_sum,
    q_dot_sum,
    k_grad,
    v_grad,
    spans,
    span_batch,
    key_spans,
    key_span_batch,
    batches,
    heads,
    length,
    keys,
    scale,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    MODE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Gradients of a block of keys and values, and what they add to those of the queries."""
    block, head, batch = place(heads, batches)
    row = block * BLOCK
    first = 0
    last = length
    if MODE == CAUSAL:
        first = row
    if MODE == SPANS:
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
        key = gl.minimum(row + gl.arange(0, BLOCK, LINE), keys - 1)
        span = key_spans + batch.to(gl.int64) * key_span_batch + 2 * key
        seen_from = gl.maximum(gl.load(span), 0)
        seen_to = gl.minimum(gl.load(span + 1), length)
        seen = seen_from < seen_to
        first = gl.min(gl.where(seen, seen_from, 1 << 30), 0)
        last = gl.max(gl.where(seen, seen_to, 0), 0)
    steps = gl.cdiv(gl.maximum(last - first, 0), BLOCK)

    dtype: gl.constexpr = q.dtype
    WIDTH: gl.constexpr = q.block_shape[4]
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], dtype)
    held = gl.allocate_shared_memory(dtype, [4, 1, 1, 1, BLOCK, WIDTH], q.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, 1, BLOCK, WIDTH], q.layout)
    g_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, 1, BLOCK, WIDTH], q.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], SQUARE)
    ds_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], SQUARE)
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(barriers.index(i), count=2 if i >= FREE else 1)
    fence_async_shared()  # the copies see the barriers

    where = batch, head, row, first, steps
    sizes = heads, length, keys, scale
    tiles = held, q_tiles, g_tiles, p_tiles, ds_tiles
    rows_of = tops, log_sums, mu, spans, span_batch
    gl.warp_specialize(
        [
            (
                _value_side,
                (rows_of, (q_dot_sum, v_grad), tiles, barriers, where, sizes, D, GROUP, MODE),
            ),
            (_key_side, ((d, d_dot), (q_sum, k_grad), tiles, barriers, where, sizes, D, GROUP)),
            (_copies, ((q, k, v, grad), (held, q_tiles, g_tiles), barriers, where, GROUP)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


def _tiles(x: Tensor) -> TensorDescriptor:
    """x [2, B, heads, S, D] for copies of BLOCK of its rows, padded with 0 to 64 or 128 columns.
    What the hardware can't step through is copied."""
    unit = 16 // x.element_size()
    steps = [s for n, s in zip(x.shape[:4], x.stride(), strict=False) if n > 1]
    if any(s == 0 or s % unit for s in steps) or x.data_ptr() % 16:
        x = x.contiguous()
    width = x.shape[-1]
    # The step of a dimension of one row is any number; the hardware wants whole 16 bytes.
    strides = [s if n > 1 else width for n, s in zip(x.shape[:4], x.stride(), strict=False)]
    bits = 8 * x.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=5)
    block = [1, 1, 1, BLOCK.value, 64 if width <= 64 else 128]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def warpgroups(given: Backward, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> None:
    """Fills the gradients, [2, B, S, heads, D] in q's dtype."""
    q, k = given.q, given.k
    _, batch, heads, length, width = q.shape
    kv_heads, keys = k.shape[2:4]
    q_sum = torch.zeros(q_grad.shape, dtype=torch.float32, device=q.device)
    mode = SPANS if given.spans is not None else CAUSAL if given.causal else FULL
    _backward[(triton.cdiv(keys, BLOCK.value) * batch * kv_heads,)](
        *(_tiles(x) for x in (q, k, given.v, given.grad)),
        *given.lse,
        given.mu,
        *given.sums,
        *q_sum,
        *(_tiles(x.transpose(2, 3)) for x in (k_grad, v_grad)),
        *spans_and_stride(given.spans),
        *spans_and_stride(given.key_spans),
        batch,
        kv_heads,
        length,
        keys,
        given.scale,
        D=width,
        GROUP=heads // kv_heads,
        MODE=mode.value,
        num_warps=WARPS.value,
        maxnreg=REGISTERS,
        enable_fp_fusion=True,  # Triton 3.10 changes the default
    )
    torch.mul(q_sum, given.scale, out=q_grad)
