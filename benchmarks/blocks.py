"""Blocks that the benchmarks time, in plain PyTorch: what a user would write."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PreNormLayer(nn.Module):
    """RMSNorm, causal attention, SwiGLU; norms before each sub-layer."""

    def __init__(self, d: int, heads: int, d_ff: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, d_ff, bias=False), nn.Linear(d, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, d = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(a.transpose(1, 2).reshape(batch, length, d))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.norm1(h))
        return h + self.mlp(self.norm2(h))


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate_half(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat((-x2, x1), -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class SandwichLayer(PreNormLayer):
    """The layer of Ouro: norms before and after each sub-layer, rotary positions."""

    def __init__(self, d: int, heads: int, d_ff: int) -> None:
        super().__init__(d, heads, d_ff)
        self.norm3, self.norm4 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)

    def angles(self, x: Tensor, width: int) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, width, 2, device=x.device, dtype=torch.float32)
        angle = torch.outer(torch.arange(x.shape[1], device=x.device), 1e6 ** (-half / width))
        angle = torch.cat((angle, angle), -1).unsqueeze(0)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, d = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = apply_rotary_pos_emb(q, k, *self.angles(x, q.shape[-1]))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(a.transpose(1, 2).reshape(batch, length, d))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.norm2(self.attention(self.norm1(h)))
        return h + self.norm4(self.mlp(self.norm3(h)))


def stack(kind: type[nn.Module], layers: int, d: int, heads: int, d_ff: int) -> nn.Sequential:
    """A block of `layers` such layers."""
    return nn.Sequential(*(kind(d, heads, d_ff) for _ in range(layers)))
