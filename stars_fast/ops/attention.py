"""Scaled-dot-product attention, dual forward and its backward.

With S = s Q K^T + mask, S_dot = s (Q_dot K^T + Q K_dot^T), P, P_dot = dual softmax(S, S_dot):
    O = P V        O_dot = P_dot V + P V_dot
With g = O_bar, b = O_dot_bar: the cotangents of P and P_dot are
    P_dot_bar = b V^T        P_bar = g V^T + b V_dot^T
and (S_bar, S_dot_bar) = dual softmax backward of them. Then
    V_dot_bar = P^T b                V_bar = P_dot^T b + P^T g
    Q_dot_bar = s S_dot_bar K        Q_bar = s (S_bar K + S_dot_bar K_dot)
    K_dot_bar = s S_dot_bar^T Q      K_bar = s (S_bar^T Q + S_dot_bar^T Q_dot)
6 matmuls forward and 12 backward here; P and P_dot are saved, O(Sq Sk) memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stars_fast.ops.precision import no_autocast, widen
from stars_fast.ops.softmax import softmax_backward, softmax_forward


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[2, B, H, S, D] -> [2, B * Hkv, (H / Hkv) * S, D]: queries of a group share their keys."""
    two, batch, heads, length, width = x.shape
    return x.reshape(two, batch * kv_heads, heads // kv_heads * length, width)


def _apply_mask(
    s: Tensor, mask: Tensor | None, causal: bool, heads: tuple[int, int, int]
) -> Tensor:
    """s [B * Hkv, G * Sq, Sk] with the mask added, in place."""
    batch, kv_heads, groups = heads
    length, keys = s.shape[1] // groups, s.shape[2]
    full = s.view(batch, kv_heads * groups, length, keys)
    if mask is not None:
        if mask.dtype == torch.bool:
            full.masked_fill_(mask.logical_not(), -torch.inf)
        else:
            full.add_(mask)
    if causal:
        future = torch.ones(length, keys, dtype=torch.bool, device=s.device).triu_(1)
        full.masked_fill_(future, -torch.inf)
    return s


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        kv_heads = k.shape[2]
        heads = (q.shape[1], kv_heads, q.shape[2] // kv_heads)
        with no_autocast(q):
            q0, q1 = _grouped(widen(q), kv_heads) * scale
            k0, k1 = widen(k).flatten(1, 2)
            v0, v1 = widen(v).flatten(1, 2)
            s = _apply_mask(q0 @ k0.mT, mask, causal, heads)
            s_dot = torch.baddbmm(q1 @ k0.mT, q0, k1.mT)
            p, p_dot = softmax_forward(s, s_dot, empty_rows=True)
            out = torch.stack((p @ v0, torch.baddbmm(p_dot @ v0, p, v1)))
        ctx.save_for_backward(q, k, v, p, p_dot)
        ctx.scale = scale
        return out.view(*q.shape[:-1], v.shape[-1]).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p, p_dot = ctx.saved_tensors
        kv_heads = k.shape[2]
        with no_autocast(q):
            q0, q1 = _grouped(widen(q), kv_heads) * ctx.scale
            k0, k1 = widen(k).flatten(1, 2)
            v0, v1 = widen(v).flatten(1, 2)
            g, b = _grouped(widen(grad), kv_heads)
            v_grad = torch.stack((torch.baddbmm(p_dot.mT @ b, p.mT, g), p.mT @ b))
            s_bar, s_dot_bar = softmax_backward(
                torch.baddbmm(g @ v0.mT, b, v1.mT), b @ v0.mT, p, p_dot
            )
            q_bar = torch.baddbmm(s_bar @ k0, s_dot_bar, k1)
            q_grad = torch.stack((q_bar, s_dot_bar @ k0)).mul_(ctx.scale)
            k_bar = torch.baddbmm(s_bar.mT @ q0, s_dot_bar.mT, q1)
            k_grad = torch.stack((k_bar, s_dot_bar.mT @ q0))
        return (
            q_grad.view(q.shape).to(q.dtype),
            k_grad.view(k.shape).to(k.dtype),
            v_grad.view(v.shape).to(v.dtype),
            None,
            None,
            None,
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Dual scaled-dot-product attention.

    Args:
        q: [2, B, H, Sq, D].
        k: [2, B, Hkv, Sk, D], H a multiple of Hkv (grouped heads).
        v: [2, B, Hkv, Sk, Dv].
        mask: broadcastable to [B, H, Sq, Sk]; boolean (True = attend) or added to the logits.
            It gets no gradient.
        causal: keep key j for query i where j <= i.
        scale: of the logits; D^-1/2 by default.

    Returns:
        [2, B, H, Sq, Dv] in q's dtype; fully masked rows give 0. 16-bit inputs compute in fp32.

    Raises:
        ValueError: shapes do not fit together.
    """
    if k.shape[:4] != v.shape[:4] or q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "attention: expected q [2, B, H, Sq, D], k [2, B, Hkv, Sk, D], v [2, B, Hkv, Sk, Dv], "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention: the heads of q must be a multiple of those of k, "
            f"got {q.shape[2]} and {k.shape[2]}"
        )
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return _Attention.apply(q, k, v, mask, causal, scale)
