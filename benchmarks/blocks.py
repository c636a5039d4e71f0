"""Blocks that the benchmarks time, in plain PyTorch: what a user would write; and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [B, H, S, D] -> causal attention [B, H, S, D]."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class PreNormLayer(nn.Module):
    """RMSNorm, causal attention, SwiGLU; norms before each sub-layer."""

    def __init__(self, d: int, heads: int, d_ff: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend: Attend = causal_attention
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, d_ff, bias=False), nn.Linear(d, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d, bias=False)

    def positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def attention(self, x: Tensor) -> Tensor:
        batch, length, d = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.positions(q, k)
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, d))

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

    def positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        length, width = q.shape[-2:]
        half = torch.arange(0, width, 2, device=q.device, dtype=torch.float32)
        angle = torch.outer(torch.arange(length, device=q.device), 1e6 ** (-half / width))
        angle = torch.cat((angle, angle), -1).unsqueeze(0)
        return apply_rotary_pos_emb(q, k, angle.cos().to(q.dtype), angle.sin().to(q.dtype))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.norm2(self.attention(self.norm1(h)))
        return h + self.norm4(self.mlp(self.norm3(h)))


KINDS: dict[str, type[PreNormLayer]] = {"pre-norm": PreNormLayer, "sandwich": SandwichLayer}


def stack(kind: type[nn.Module], layers: int, d: int, heads: int, d_ff: int) -> nn.Sequential:
    """A block of `layers` such layers."""
    return nn.Sequential(*(kind(d, heads, d_ff) for _ in range(layers)))


@contextmanager
def attending(block: nn.Module, attend: Attend) -> Iterator[None]:
    """All layers of `block` attend by this function inside."""
    layers = [layer for layer in block.modules() if isinstance(layer, PreNormLayer)]
    before = [layer.attend for layer in layers]
    try:
        for layer in layers:
            layer.attend = attend
        yield
    finally:
        for layer, attend in zip(layers, before, strict=True):
            layer.attend = attend


@contextmanager
def plain_norms(block: nn.Module) -> Iterator[None]:
    """The norms of `block` are made of plain operations inside."""
    norms = [module for module in block.modules() if isinstance(module, nn.RMSNorm)]
    try:
        for norm in norms:
            norm.__dict__["forward"] = partial(rms_norm, norm)
        yield
    finally:
        for norm in norms:
            norm.__dict__.pop("forward", None)


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    """The RMSNorm `norm` of x by plain operations, in x's dtype whatever that of the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return norm.weight.to(x.dtype) * wide.to(x.dtype)


@dataclass(frozen=True)
class Shape:
    """Sizes of a block and of its state [batch, length, width]."""

    width: int = 512
    heads: int = 8
    d_ff: int = 1408
    layers: int = 4
    batch: int = 2
    length: int = 512
    kind: str = "pre-norm"

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width: expected a multiple of twice the heads ({self.heads}), got {self.width}"
            )

    def checked(self) -> Shape:
        """The same block at sizes that can be had in fp64."""
        few = {"layers": 2, "batch": 2, "length": 256}
        return replace(self, **{name: min(getattr(self, name), most) for name, most in few.items()})

    def small(self) -> Shape:
        """The same block at sizes that prove a program."""
        layers, batch, length = min(self.layers, 2), min(self.batch, 2), min(self.length, 32)
        return replace(self, width=64, heads=4, d_ff=176, layers=layers, batch=batch, length=length)


SHAPES = {
    "study": Shape(),
    "addition": Shape(d_ff=1024, layers=1, batch=64, length=16),
    "ouro": Shape(2048, 16, 5632, layers=1, batch=1, length=2048, kind="sandwich"),
    "ouro-8k": Shape(2048, 16, 5632, layers=1, batch=1, length=8192, kind="sandwich"),
}


def build_block(
    shape: Shape, device: torch.device | str, dtype: torch.dtype
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """The block, a state h and a direction u of unit RMS, both [batch, length, width]; the same
    numbers each time on a device. They are drawn there: on the host large blocks take seconds."""
    device = torch.device(device)
    forked = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), device:
        torch.manual_seed(0)
        block = stack(KINDS[shape.kind], shape.layers, shape.width, shape.heads, shape.d_ff)
        h, u = (torch.randn(shape.batch, shape.length, shape.width) for _ in range(2))
    return block.to(device, dtype), h.to(device, dtype), unit_rms(u).to(device, dtype)


def unit_rms(u: Tensor) -> Tensor:
    """u [...] over its root mean square, in fp64."""
    return u.double() / u.double().square().mean().sqrt()
