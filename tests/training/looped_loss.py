"""A small looped model in the place of the trainer's `StepLoss`, for tests that wrap, shard, cast
and recompute it: layers called once a turn, and once more for the penalty with a stacked pair.

Its ops are the package's, or with `plain` PyTorch's, written out, with `torch.func.jvp`.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stars_fast import Dual, fused_jsrr, ops
from stars_fast.ops.linear_cross_entropy import linear_cross_entropy

VOCABULARY, HEADS, EPS = 50, 2, 1e-6


@dataclass(frozen=True)
class Micro:
    """tokens: [B, S]; turns, of which so many without a graph."""

    tokens: torch.Tensor
    turns: int
    skipped: int = 0


@dataclass(frozen=True)
class Context:
    """What the layers share, as a model gives it: frozen, with a field that no one passes."""

    cos: torch.Tensor
    sin: torch.Tensor
    seen: dict = field(default_factory=dict, init=False)


def micro_batch(number, turns, skipped=0, length=12):
    generator = torch.Generator().manual_seed(number)
    return Micro(torch.randint(VOCABULARY, (2, length), generator=generator), turns, skipped)


def plain_norm(x, weight):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype) * weight


def plain_rotary(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def plain_attention(q, k, v):
    seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype) @ v


class Layer(nn.Module):
    def __init__(self, width, plain):
        super().__init__()
        self.plain = plain
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(4))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def norm(self, x, index, dual):
        if self.plain:
            return plain_norm(x, self.norms[index])
        return ops.rms_norm(x, self.norms[index], EPS, dual=dual)

    def forward(self, x, context, turn=0, dual=False):
        n = self.norm(x, 0, dual)
        qkv = self.qkv(n).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-3, -2)
        rotary = plain_rotary if self.plain else ops.rotary
        q, k = (rotary(each, context.cos, context.sin) for each in qkv[:2])
        if self.plain:
            mixed = plain_attention(q, k, qkv[2])
        elif dual:
            mixed = ops.attention(q, k, qkv[2], causal=True)
        else:
            mixed = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        branch = self.out(mixed.transpose(-3, -2).flatten(-2))
        x = x + self.norm(branch, 1, dual)
        gate, up = self.gate_up(self.norm(x, 2, dual)).chunk(2, -1)
        both = F.silu(gate) * up if self.plain else ops.gated(gate, up, "silu", dual=dual)
        return x + self.norm(self.down(both), 3, dual)


class LoopedLoss(nn.Module):
    """Token loss, and penalty, after the turns of a micro-batch; recompute: none, layer, turn."""

    def __init__(self, width=16, penalised=True, plain=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, plain) for _ in range(2))
        self.closing = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.penalised, self.plain, self.recompute = penalised, plain, "none"

    def turn(self, h, context, recompute="none"):
        dual = isinstance(h, Dual)
        x = h.stack if dual else h
        for layer in self.layers:
            if recompute == "layer":
                x = checkpoint(layer, x, context, 0, dual, use_reentrant=False)
            else:
                x = layer(x, context, 0, dual)
        if self.plain:
            return plain_norm(x, self.closing)
        x = ops.rms_norm(x, self.closing, EPS, dual=dual)
        return Dual(x) if dual else x

    def context(self, h):
        width = h.shape[-1] // HEADS
        frequency = 100.0 ** -torch.linspace(0, 1, width // 2)
        angle = torch.outer(torch.arange(h.shape[1]), torch.cat((frequency, frequency)))
        return Context(*(table.to(h.dtype)[None] for table in (angle.cos(), angle.sin())))

    def penalty(self, h, context):
        v = torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).to(h.dtype)
        if not self.plain:
            return fused_jsrr(lambda x: self.turn(x, context, self.recompute), h, v=v)
        u = v / v.square().mean((1, 2), keepdim=True).sqrt()
        _, jv = torch.func.jvp(lambda x: self.turn(x, context), (h.detach(),), (u,))
        return jv.to(torch.promote_types(jv.dtype, torch.float32)).square().mean()

    def forward(self, micro):
        h = start = self.embedding(micro.tokens)
        if torch.is_autocast_enabled("cpu"):
            h = h.to(torch.get_autocast_dtype("cpu"))
        context = self.context(h)
        for t in range(micro.turns):
            with torch.set_grad_enabled(torch.is_grad_enabled() and t >= micro.skipped):
                if self.recompute == "turn":
                    h = checkpoint(self.turn, h, context, use_reentrant=False)
                else:
                    h = self.turn(h, context, self.recompute)
            if t + 1 == micro.skipped:
                h = h + 0.0 * start
        if self.plain:
            logits = self.head(h).to(torch.promote_types(h.dtype, torch.float32))
            loss = F.cross_entropy(logits.flatten(0, 1), micro.tokens.flatten())
        else:
            loss = linear_cross_entropy(h, self.head.weight, micro.tokens).loss
        return loss + self.penalty(h, context) if self.penalised else loss
