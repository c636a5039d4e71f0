"""Backward of the dual attention: what its designs share, and which of them runs.

With g = O_bar, b = O_dot_bar, for P and S_dot computed again from lse and mu, tile by tile:
    D = rowsum(b O)    D_dot = rowsum(g O + b O_dot)    E = b V^T - D    P_dot = P (S_dot - mu)
    dS = P E           dS_dot = P_dot E + P (g V^T + b V_dot^T - D_dot)
    V_dot_bar = P^T b            V_bar = P_dot^T b + P^T g
    K_dot_bar = s dS^T Q         K_bar = s (dS_dot^T Q + dS^T Q_dot)
    Q_dot_bar = s dS K           Q_bar = s (dS_dot K + dS K_dot)
One kernel here for D and D_dot; the rest by a design of `DESIGNS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stars_fast.ops.triton.attention_fused import fused
from stars_fast.ops.triton.attention_fused import takes as takes_fused
from stars_fast.ops.triton.attention_parts import (
    VARYING,
    Backward,
    constants,
    load_tile,
    place,
    plane,
    positive_scale,
    rows_contiguous,
    strides,
)
from stars_fast.ops.triton.attention_split import split
from stars_fast.ops.triton.tiles import Tile, architecture

ROWS = 16  # of a program of _row_sums; more of the widest heads spill


@triton.jit(do_not_specialize=VARYING)
def _row_sums(
    grad,
    out,
    sums,
    grad_half,
    grad_batch,
    grad_head,
    grad_row,
    out_half,
    out_batch,
    out_head,
    out_row,
    batches,
    heads,
    length,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    HELD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """D and D_dot, sums [2, B, H, Sq], as the diagonals of products: where O is the value of one
    key, D is the very sum that E is taken from, and E exactly 0."""
    block, head, batch = place(heads, batches)
    rows = block * HELD + tl.arange(0, HELD)
    columns = tl.arange(0, WIDTH)
    grad = plane(grad, batch, head, grad_batch, grad_head, UNIT)
    out = plane(out, batch, head, out_batch, out_head, UNIT)
    grad_row *= UNIT
    out_row *= UNIT
    g = load_tile(grad, rows, grad_row, columns, length, D, True)
    o = tl.trans(load_tile(out, rows, out_row, columns, length, D, True))
    grad += grad_half.to(tl.int64) * UNIT
    out += out_half.to(tl.int64) * UNIT
    b = load_tile(grad, rows, grad_row, columns, length, D, True)
    o_dot = tl.trans(load_tile(out, rows, out_row, columns, length, D, True))
    d = tl.dot(b, o, input_precision=PRECISION)
    d_dot = tl.dot(g, o, input_precision=PRECISION)
    d_dot = tl.dot(b, o_dot, d_dot, input_precision=PRECISION)
    own = tl.arange(0, HELD)[:, None] == tl.arange(0, HELD)[None, :]
    sums += (batch.to(tl.int64) * heads + head) * length + rows
    half = batches.to(tl.int64) * heads * length
    tl.store(sums, tl.sum(tl.where(own, d, 0.0), 1), rows < length)
    tl.store(sums + half, tl.sum(tl.where(own, d_dot, 0.0), 1), rows < length)


def row_sums(grad: Tensor, out: Tensor) -> Tensor:
    """D and D_dot, [2, B, H, Sq] in fp32, of the cotangents and results [2, B, H, Sq, D]."""
    _, batch, heads, length, _ = out.shape
    sums = torch.empty(2, batch, heads, length, dtype=torch.float32, device=out.device)
    unit, steps = strides(grad, out)
    shared = constants(out, out, None, False, unit, Tile(ROWS, 1, 4, 1))
    used = {name: x for name, x in shared.items() if name not in ("GROUP", "MODE", "STREAMED")}
    _row_sums[(triton.cdiv(length, ROWS) * batch * heads,)](
        grad, out, sums, *steps, batch, heads, length, **used
    )
    return sums


class Design(NamedTuple):
    """A way to compute the gradients.

    Attributes:
        run: fills q_grad, k_grad and v_grad, [2, B, S, heads, D] contiguous in q's dtype. Neither
            queries nor keys are none, and the scale is above 0.
        deterministic: whether the bits are the same each time.
        takes: whether it takes tensors like q [2, B, H, Sq, D].
    """

    run: Callable[[Backward, Tensor, Tensor, Tensor], None]
    deterministic: bool
    takes: Callable[[Tensor], bool]


def _warpgroups(given: Backward, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> None:
    # Here, because no other design needs Gluon, which Triton calls experimental.
    from stars_fast.ops.triton.attention_warpgroups import warpgroups

    warpgroups(given, q_grad, k_grad, v_grad)


def _takes_warpgroups(q: Tensor) -> bool:
    """sm_90, and 16-bit heads up to 128 wide in rows of whole 16 bytes."""
    width = q.shape[-1]
    fits = width <= 128 and width % 8 == 0 and q.dtype in (torch.float16, torch.bfloat16)
    return fits and architecture(q.device) == "sm_90"


DESIGNS = {
    "split": Design(split, True, lambda q: True),
    "fused": Design(fused, False, takes_fused),
    "warpgroups": Design(_warpgroups, False, _takes_warpgroups),
}
# By architecture; "split" where an architecture is not named or the design does not take a tensor.
# None is named until it has been measured: for sm_80 a model of the compiled loops predicts that
# "fused" takes 0.84 of the time, before what its atomics cost.
CHOSEN: dict[str, str] = {}
OVERRIDE = "STARS_FAST_ATTENTION_BACKWARD"
"""Environment variable with the name of a design, for comparisons: it is taken where CHOSEN would
be, by tensors that it takes."""


def design(q: Tensor) -> str:
    """The name of the design for tensors like q: always a deterministic one with
    `torch.use_deterministic_algorithms(True)`.

    Raises:
        ValueError: the environment names a design that is not there.
    """
    name = os.environ.get(OVERRIDE) or CHOSEN.get(architecture(q.device), "split")
    if name not in DESIGNS:
        raise ValueError(f"{OVERRIDE}: expected one of {tuple(DESIGNS)}, got {name!r}")
    fixed = torch.are_deterministic_algorithms_enabled()
    found = DESIGNS[name]
    return name if found.takes(q) and (found.deterministic or not fixed) else "split"


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mu: Tensor,
    spans: Tensor | None,
    key_spans: Tensor | None,
    causal: bool,
    scale: float,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, by the design for them.

    Args:
        grad: [2, B, H, Sq, D] in q's dtype, the cotangents of O and O_dot.
        q, k, v, spans, causal, scale: those of the forward.
        out, lse, mu: its results.
        key_spans: [B or 1, Sk, 2] int32, the queries [from, to) among which are all that see a key.
        exact: whether all of those see it.

    Returns:
        [2, B, H, Sq, D], [2, B, Hkv, Sk, D] and [2, B, Hkv, Sk, D] in q's dtype and the memory
        order [2, B, S, H, D].
    """
    return backward_by(
        design(q), grad, q, k, v, out, lse, mu, spans, key_spans, causal, scale, exact
    )  # fmt: skip


def backward_by(
    name: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mu: Tensor,
    spans: Tensor | None,
    key_spans: Tensor | None,
    causal: bool,
    scale: float,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward` by the design `name`."""
    q, sign, scale = positive_scale(q, scale)
    grad, q, k, v, out = rows_contiguous(grad, q, k, v, out)
    _, batch, heads, length, width = q.shape
    kv_heads, keys = k.shape[2:4]
    q_grad = q.new_empty(2, batch, length, heads, width)
    k_grad, v_grad = (q.new_empty(2, batch, keys, kv_heads, width) for _ in range(2))
    if mu.numel() == 0 or keys == 0:
        for x in (q_grad, k_grad, v_grad):
            x.zero_()
    else:
        sums = row_sums(grad, out)
        given = Backward(grad, q, k, v, lse, mu, sums, spans, key_spans, causal, scale, exact)
        DESIGNS[name].run(given, q_grad, k_grad, v_grad)
    if sign != 1:
        q_grad *= sign
    return q_grad.transpose(2, 3), k_grad.transpose(2, 3), v_grad.transpose(2, 3)
