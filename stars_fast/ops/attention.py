"""Scaled-dot-product attention, dual forward and its backward.

With S = s Q K^T + mask, S_dot = s (Q_dot K^T + Q K_dot^T), P = softmax(S), mu = sum(P S_dot),
P_dot = P (S_dot - mu):
    O = P V        O_dot = P_dot V + P V_dot
With g = O_bar, b = O_dot_bar: the cotangents of P and P_dot are
    P_dot_bar = b V^T        P_bar = g V^T + b V_dot^T
and with D = sum(b O), D_dot = sum(g O + b O_dot), E = P_dot_bar - D:
    S_dot_bar = P E                  S_bar = P_dot E + P (P_bar - D_dot)
    V_dot_bar = P^T b                V_bar = P_dot^T b + P^T g
    Q_dot_bar = s S_dot_bar K        Q_bar = s (S_bar K + S_dot_bar K_dot)
    K_dot_bar = s S_dot_bar^T Q      K_bar = s (S_bar^T Q + S_dot_bar^T Q_dot)
Nothing of size Sq x Sk is kept. On a GPU one fused kernel each way (`triton/attention.py`), where
every query sees one interval of keys (`spans.py`); else blocks of queries (`attention_blocked.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.arguments import check_stack
from stars_fast.ops.attention_blocked import BlockedAttention
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.library import compiled, shapes
from stars_fast.ops.spans import Spans


@shapes("attention")
def _attention_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor | None,
    key_spans: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    two, batch, heads, length, width = q.shape
    out = q.new_empty(two, batch, length, heads, width).transpose(2, 3)
    mu = q.new_empty(batch, heads, length, dtype=torch.float32)
    return out, mu.new_empty(2, *mu.shape), mu


@shapes("attention_backward")
def _attention_backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.transpose(2, 3).shape).transpose(2, 3) for x in (q, k, v))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: Tensor | None,
        key_spans: Tensor | None,
        causal: bool,
        scale: float,
        exact: bool,
    ) -> Tensor:
        forward = compiled("attention", q)
        assert forward is not None
        out, lse, mu = forward(q, k, v, spans, key_spans, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse, mu, spans, key_spans)
        ctx.options = causal, scale, exact
        return out.detach()  # no view: it may be written to

    @staticmethod
    @first_derivative("attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mu, spans, key_spans = ctx.saved_tensors
        backward = compiled("attention_backward", q)
        if backward is None:
            raise RuntimeError("attention: the backend was switched between forward and backward")
        bars = backward(grad, q, k, v, out, lse, mu, spans, key_spans, *ctx.options)
        return (*bars, *[None] * 5)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    *,
    spans: Spans | None = None,
) -> Tensor:
    """Dual scaled-dot-product attention.

    Args:
        q: [2, B, H, Sq, D].
        k: [2, B, Hkv, Sk, D], H a multiple of Hkv (grouped heads).
        v: [2, B, Hkv, Sk, Dv].
        mask: broadcastable to [B, H, Sq, Sk]; boolean (True = attend) or added to the logits.
            It gets no gradient. Boolean masks in which every query sees one interval of keys
            (padding, causal, sliding windows, packed documents) take the fused kernel.
        causal: keep key j for query i where j <= i.
        scale: of the logits; D^-1/2 by default.
        spans: the interval of keys of each query, instead of `mask` and `causal`; packed documents
            are `Spans.of_documents`.

    Returns:
        [2, B, H, Sq, Dv] in q's dtype and the memory order [2, B, Sq, H, Dv]; fully masked rows
        give 0. 16-bit inputs compute in fp32. O(Sq + Sk) memory.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape, or `spans` with `mask` or
            `causal`.
    """
    _check(q, k, v, spans)
    if spans is not None and (mask is not None or causal):
        raise ValueError("attention: spans: expected None when mask or causal is given")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"attention: q, k and v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if mask is not None:
        mask = _four_dimensional(mask, q, k)
        if mask.dtype == torch.bool and mask.shape[1] == 1:
            spans = Spans.of_mask(mask.expand(-1, 1, q.shape[3], k.shape[3]))
        if spans is not None:
            spans, mask, causal = spans.causal() if causal else spans, None, False
    widest = 128 if q.dtype == torch.float32 else 256  # tiles of more do not fit every GPU
    fused = mask is None and v.shape[-1] == q.shape[-1] <= widest
    if fused and compiled("attention", q) is not None:
        if spans is None:
            return _Fused.apply(q, k, v, None, None, causal, scale, False)
        return _Fused.apply(q, k, v, spans.queries, spans.keys, causal, scale, spans.exact)
    queries = None if spans is None else spans.queries
    return BlockedAttention.apply(q, k, v, queries, mask, causal, scale)


def _four_dimensional(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """[B or 1, H or 1, Sq or 1, Sk or 1]."""
    full = (*q.shape[1:4], k.shape[3])
    shape = (*[1] * (4 - mask.dim()), *mask.shape)
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ValueError(
            f"attention: mask must broadcast to [B, H, Sq, Sk] = {list(full)}, "
            f"got {list(mask.shape)}"
        )
    return mask.view(shape)


def _check(q: Tensor, k: Tensor, v: Tensor, spans: Spans | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_stack("attention", name, x)
    fits = q.dim() == k.dim() == v.dim() == 5
    fits = fits and k.shape[:4] == v.shape[:4] and q.shape[:2] == k.shape[:2]
    if not fits or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "attention: expected q [2, B, H, Sq, D], k [2, B, Hkv, Sk, D], v [2, B, Hkv, Sk, Dv], "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention: the heads of q: expected a multiple of those of k, "
            f"got {q.shape[2]} and {k.shape[2]}"
        )
    if spans is None:
        return
    batch = q.shape[1]
    for given, length in ((spans.queries, q.shape[3]), (spans.keys, k.shape[3])):
        if given.shape not in ((1, length, 2), (batch, length, 2)) or given.dtype != torch.int32:
            raise ValueError(
                f"attention: expected spans int32 [B or 1, {length}, 2], got {given.dtype} "
                f"{list(given.shape)}"
            )
