"""Parts of the attention kernels and of their launchers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stars_fast.ops.triton.tiles import Tile

LOG2E = tl.constexpr(1.4426950408889634)
# What queries see.
FULL = tl.constexpr(0)
CAUSAL = tl.constexpr(1)
SPANS = tl.constexpr(2)


class Backward(NamedTuple):
    """The inputs of a backward.

    Attributes:
        grad: [2, B, H, Sq, D] in q's dtype, the cotangents of O and O_dot.
        q, k, v: as the forward has them, the last dimension contiguous.
        lse, mu: results of the forward.
        sums: fp32 [2, B, H, Sq], D = rowsum(b O) and D_dot = rowsum(g O + b O_dot).
        spans: int32 [B or 1, Sq, 2] or None, the keys [from, to) that a query sees.
        key_spans: int32 [B or 1, Sk, 2] or None, the queries [from, to) among which are all that
            see a key.
        causal: without spans: query i sees the keys j <= i.
        scale: of the logits, above 0.
        exact: every query among which key_spans says all are sees the key.
    """

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    mu: Tensor
    sums: Tensor
    spans: Tensor | None
    key_spans: Tensor | None
    causal: bool
    scale: float
    exact: bool = False


@triton.jit
def place(heads, batches):
    """Block, head and batch of this program. Heads and batches go fastest: the blocks that start
    together are those of one place in the sequence, and so equally long. All on the first axis of
    the grid, the only one that holds more than 65,535."""
    program = tl.program_id(0)
    return program // heads // batches, program % heads, program // heads % batches


@triton.jit
def span(spans, batch, rows, length, others, MODE: tl.constexpr):
    """The half-open interval of `others` that each of `rows` sees: [2^30, 0) where it sees none.
    Rows past the last act as the last."""
    rows = tl.minimum(rows, length - 1)
    if MODE == SPANS:
        spans, batch_stride = spans
        spans += batch.to(tl.int64) * batch_stride + 2 * rows
        lo = tl.maximum(tl.load(spans), 0)
        hi = tl.minimum(tl.load(spans + 1), others)
    else:
        lo = tl.zeros_like(rows)
        hi = lo + others
        if MODE == CAUSAL:
            hi = tl.minimum(rows + 1, hi)
    empty = lo >= hi
    return tl.where(empty, 1 << 30, lo), tl.where(empty, 0, hi)


@triton.jit
def key_tiles(lo, hi, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """The tiles of keys for rows with the spans lo and hi.

    Returns start, before, whole, masked: tile t begins at key start + t BLOCK. Every row sees all
    of the `whole` tiles from t = before on; the other `masked` tiles lie on both sides of those.
    """
    first = 0
    whole_from = 0
    if MODE == SPANS:
        first = tl.min(lo, 0)
        whole_from = tl.max(lo, 0)
    whole = tl.maximum(tl.min(hi, 0) - whole_from, 0) // BLOCK
    if MODE == SPANS:
        whole_from = tl.where(whole > 0, whole_from, first)
    before = tl.cdiv(whole_from - first, BLOCK)
    after = tl.cdiv(tl.maximum(tl.max(hi, 0) - whole_from - whole * BLOCK, 0), BLOCK)
    return whole_from - before * BLOCK, before, whole, before + after


@triton.jit
def plane(x, batch, head, batch_stride, head_stride, UNIT: tl.constexpr):
    """The matrix of a batch and a head; strides in UNIT elements."""
    return x + (batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride) * UNIT


@triton.jit
def load_tile(x, rows, row_stride, columns, length, D: tl.constexpr, MASKED: tl.constexpr):
    """x[rows, columns]; 0 for columns past D and, if MASKED, for rows outside [0, length)."""
    # Recomputed for every tile: to keep it takes more registers than the arithmetic.
    x += rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    PADDED: tl.constexpr = D < 16 or triton.next_power_of_2(D) != D
    if MASKED:
        inside = ((rows >= 0) & (rows < length))[:, None]
        if PADDED:
            inside = inside & (columns < D)[None, :]
        return tl.load(x, inside, 0.0)
    if PADDED:
        return tl.load(x, (columns < D)[None, :], 0.0)
    return tl.load(x)


@triton.jit
def store_pair(
    x, value, dot, batch, head, batches, heads, rows, columns, length, D: tl.constexpr
):  # fmt: skip
    """Both halves of x [2, B, S, H, D]."""
    dtype = x.dtype.element_ty
    half = length.to(tl.int64) * heads * D
    x = plane(x, batch, head, half, D, 1) + rows.to(tl.int64)[:, None] * (heads * D)
    x += columns[None, :]
    inside = (rows < length)[:, None] & (columns < D)[None, :]
    tl.store(x, value.to(dtype), inside)
    tl.store(x + half * batches, dot.to(dtype), inside)


@triton.jit
def visible_keys(keys, lo, hi, MODE: tl.constexpr):
    """Whether the rows see the keys, shapes that broadcast."""
    if MODE == SPANS:
        return (keys >= lo) & (keys < hi)
    return keys < hi


# Arguments whose value must not choose another compiled kernel. Alignment is in UNIT instead.
VARYING = [
    f"{name}_{axis}"
    for name in ("q", "k", "v", "out", "grad")
    for axis in ("half", "batch", "head", "row")
] + ["span_batch", "key_span_batch", "batches", "heads", "length", "keys", "scale"]


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, int, float]:
    """q times a sign, the sign, and a scale above 0 that give the same logits: with such a scale
    the largest product is the largest logit."""
    if scale > 0:
        return q, 1, scale
    sign = -1 if scale < 0 else 0
    return q * sign, sign, -scale if sign else 1.0


def rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    """The tensors, copied where the last dimension is not contiguous."""
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]


def strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """The first four strides of each tensor in units, and the unit: as many elements as 16 bytes
    hold if all strides and addresses are multiples of that, else 1."""
    unit = 16 // tensors[0].element_size()
    found = [
        s if n > 1 else 0 for x in tensors for n, s in zip(x.shape[:4], x.stride(), strict=False)
    ]
    if any(s % unit for s in found) or any(x.data_ptr() % 16 for x in tensors):
        unit = 1
    return unit, [s // unit for s in found]


def spans_and_stride(spans: Tensor | None) -> tuple[Tensor | None, int]:
    """Spans [B or 1, S, 2] and how many elements a batch is away from the next."""
    if spans is None:
        return None, 0
    return spans.contiguous(), 2 * spans.shape[1] if spans.shape[0] > 1 else 0


def constants(
    q: Tensor, k: Tensor, spans: Tensor | None, causal: bool, unit: int, tile: Tile
) -> dict[str, int | str | bool]:
    """Compile-time arguments and options of a kernel."""
    width = q.shape[4]
    precision = "ieee"
    if q.dtype == torch.float32:
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            precision = "tf32"
        elif width <= 128:
            # Three products in TF32: fp32 but for its last bits, in fewer registers.
            precision = "tf32x3"
    return {
        "D": width,
        "WIDTH": max(16, triton.next_power_of_2(width)),
        "GROUP": q.shape[2] // k.shape[2],
        "MODE": (SPANS if spans is not None else CAUSAL if causal else FULL).value,
        "UNIT": unit,
        "PRECISION": precision,
        "HELD": tile.held,
        "STREAMED": tile.streamed,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        # Triton 3.10 changes the default.
        "enable_fp_fusion": True,
    }
