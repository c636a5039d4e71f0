"""The spec: each op in plain PyTorch, on ordinary tensors.

The dual of an op is `torch.func.jvp` of its reference and the gradient of the dual is autograd of
that, in fp64. No second description of an op exists.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., D], weight [D], bias [D] -> [..., D]."""
    centred = x - x.mean(-1, keepdim=True)
    y = rms_norm(centred, weight, eps)
    return y if bias is None else y + bias


def softmax(x: Tensor) -> Tensor:
    """x [..., N] -> [..., N], over the last dimension."""
    return torch.softmax(x, -1)


def attention_weights(x: Tensor) -> Tensor:
    """Softmax in which rows of -inf give 0."""
    top = x.amax(-1, keepdim=True).detach()
    e = torch.exp(x - torch.where(top.isinf(), 0.0, top))
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, 1.0, total)


def gated(g: Tensor, u: Tensor, activation: str) -> Tensor:
    """g, u [..., D] -> f(g) u."""
    return pointwise(g, activation) * u


def pointwise(x: Tensor, name: str) -> Tensor:
    """x [...] -> f(x)."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "relu": F.relu,
        "identity": lambda z: z,
        "square": torch.square,
    }
    return functions[name](x) if name in functions else getattr(torch, name)(x)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, S, D], cos and sin [B or 1, S, D] -> [B, H, S, D]."""
    x1, x2 = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-x2, x1), -1) * sin.unsqueeze(1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] -> [B, H, Sq, Dv].

    `mask` broadcasts to [B, H, Sq, Sk]: boolean (True = attend) or added to the logits. `causal`
    keeps key j for query i where j <= i. Fully masked rows give 0.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    if causal:
        keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~keep, -torch.inf)
    return attention_weights(s) @ v
