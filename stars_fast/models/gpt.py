"""GPT layers in the four norm placements and three operators of the paper's norm study.

Each sub-layer `f` (causal attention, MLP) of a layer sits in one of four ways in the residual
stream, `N` and `N'` being norms with their own parameters:

    pre            x + f(N(x))
    post           N'(x + f(x))
    pre-sandwich   x + N'(f(N(x)))
    post-sandwich  N'(x + f(N(x)))

The layers are written once, with plain tensor operations, and run on a tensor or on a
`stars_fast.Dual`.

Shapes: B batch, S tokens, D model width, H heads, F MLP width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast.models.looped_config import ACTIVATIONS, NORMS, LoopedConfig


def make_norm(norm: str, d_model: int) -> nn.Module:
    """The norm operator `norm` over the last dimension of size `d_model`.

    "simplenorm" is LayerNorm without scale and shift.

    Raises:
        ValueError: another name.
    """
    if norm == "layernorm":
        return nn.LayerNorm(d_model)
    if norm == "rmsnorm":
        return nn.RMSNorm(d_model, eps=1e-5)
    if norm == "simplenorm":
        return nn.LayerNorm(d_model, elementwise_affine=False)
    raise ValueError(f"norm: expected one of {NORMS}, got {norm!r}")


class CausalAttention(nn.Module):
    """Multi-head causal self-attention, [B, S, D] -> [B, S, D], to all tokens up to its own or the
    last `window` of them."""

    def __init__(self, d_model: int, n_heads: int, window: int | None = None) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.window = window
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        q, k, v = (
            part.view(B, S, self.n_heads, D // self.n_heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        seen = None
        if self.window is not None and self.window < S:
            seen = torch.ones(S, S, dtype=torch.bool, device=x.device).tril().triu(1 - self.window)
        o = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
        return self.out(o.transpose(1, 2).reshape(B, S, D))


class MLP(nn.Module):
    """Two linear maps with an activation between them, [B, S, D] -> [B, S, D]."""

    def __init__(self, d_model: int, d_ff: int, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff)
        self.activation = ACTIVATIONS[activation]
        self.out = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.activation(self.up(x)))


class Residual(nn.Module):
    """A sub-layer `f` in the residual stream, in one of the four placements."""

    def __init__(
        self, f: nn.Module, placement: str, norm: str, d_model: int, dropout: float
    ) -> None:
        super().__init__()
        self.f = f
        self.norm_in = nn.Identity() if placement == "post" else make_norm(norm, d_model)
        self.norm_out = nn.Identity() if placement == "pre" else make_norm(norm, d_model)
        self.norm_after_sum = placement in ("post", "post-sandwich")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.f(self.norm_in(x)))
        return self.norm_out(x + y) if self.norm_after_sum else x + self.norm_out(y)


class GPTBlock(nn.Module):
    """One layer: causal attention, then the MLP, each a residual sub-layer.

    `config` gives `d_model`, `n_heads`, `window`, `d_ff`, `placement`, `norm`, `activation` and
    `dropout` (on each sub-layer's output). Maps h [B, S, D] to [B, S, D] in the same dtype.
    """

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        place = (config.placement, config.norm, config.d_model, config.dropout)
        self.attention = Residual(
            CausalAttention(config.d_model, config.n_heads, config.window), *place
        )
        self.mlp = Residual(MLP(config.d_model, config.d_ff, config.activation), *place)

    def forward(self, h: Tensor) -> Tensor:
        return self.mlp(self.attention(h))
