"""The layers of Huginn and of retrofitted decoders, written once for tensors and for pairs of
primal and tangent. N_i are RMSNorms, A is attention, M the MLP.

    huginn   h = N2(h + A(N1(h)))      h = N4(h + M(N3(h)))
    llama    h = h + A(N1(h))          h = h + M(N2(h))
    olmo2    h = h + N1(A(h))          h = h + N2(M(h))

Formulas and names of weights are those of recpre/raven_modeling_minimal.py in
https://github.com/seal-rg/recurrent-pretraining (Geiping et al. 2025,
https://arxiv.org/abs/2502.05171), and of convert_pretrained_model/raven_modeling_minimal_llama.py
and _olmo.py in https://github.com/mcleish7/retrofitting-recurrence (McLeish et al. 2025,
https://arxiv.org/abs/2511.07384), read in the fork LoopedLMs/retrofitting-recurrence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stars_fast import functional
from stars_fast.models.huginn.config import HuginnConfig
from stars_fast.models.ouro.attention import attend
from stars_fast.models.plain_linear import is_plain, project, project_merged

if TYPE_CHECKING:
    from stars_fast.models.ouro.context import Context

FULL = "full_attention"


class HuginnRMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x / rms(x) * weight, [..., D], in `dtype`, by default x's."""
        return functional.rms_norm(x, self.weight, self.eps, dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class HuginnAttention(nn.Module):
    """Causal attention with rotary positions, [.., B, S, D] -> [.., B, S, D].

    Queries, keys and values come from one map. Huginn turns neighbouring entries of a head, 2j and
    2j + 1, by the j-th angle; the others turn j and j + D / 2. Queries and keys are brought into
    the latter order first, which changes no product of the two.
    """

    def __init__(self, config: HuginnConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.is_causal = True
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        heads, kv_heads = config.n_heads, config.num_key_value_heads
        self.num_key_value_groups = heads // kv_heads
        self.widths = [n * config.head_dim for n in (heads, kv_heads, kv_heads)]
        self.in_pairs = config.layer_layout in (None, "huginn")
        self.Wqkv = nn.Linear(config.n_embd, sum(self.widths), bias=False)
        if config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, heads, config.head_dim))
        else:
            self.register_parameter("qk_bias", None)
        if config.layer_layout == "olmo2":
            self.q_norm = HuginnRMSNorm(self.widths[0], config.norm_eps)
            self.k_norm = HuginnRMSNorm(self.widths[1], config.norm_eps)
        self.proj = nn.Linear(self.widths[0], config.n_embd, bias=False)

    def forward(self, x: Tensor, context: Context, turn: int = 0) -> Tensor:
        context = context.on(x.device)
        q, k, v = project(self.Wqkv, x).split(self.widths, -1)
        if self.config.layer_layout == "olmo2":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.qk_bias is not None:
            q_bias, k_bias = self.qk_bias.to(q.dtype).flatten(1)
            q, k = q + q_bias, k + k_bias
        q, k = (self._turned(each, context) for each in (q, k))
        v = functional.split_heads(v, self.head_dim)
        if context.cache is not None:
            k, v = context.cache.append(k, v, turn, self.layer_idx, context.rows)
        return project_merged(self.proj, attend(self, q, k, v, context.visible[FULL]))

    def _turned(self, x: Tensor, context: Context) -> Tensor:
        """[B, S, H * D] -> [B, H, S, D], turned by the tokens' positions."""
        x = functional.split_heads(x, self.head_dim)
        if self.in_pairs:
            x = functional.pairs_to_halves(x)
        return functional.rotary(x, context.cos, context.sin)


class HuginnMLP(nn.Module):
    """proj(silu(g) * u), (g, u) = fc(x), [.., D] -> [.., D]."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        g, u = project(self.fc, x).chunk(2, -1)
        return project(self.proj, functional.gated(g, u, "silu"))


class HuginnLayer(nn.Module):
    """The branches and norms of a layer of any layout, h [.., B, S, D] -> [.., B, S, D].

    Args:
        layer: its place: 0, 1, ... in the core and on into the coda, -1, -2, ... back into the
            prelude. It matters for the cache alone.
    """

    norms = 2

    def __init__(self, config: HuginnConfig, layer: int) -> None:
        super().__init__()
        self.attn = HuginnAttention(config, layer)
        self.mlp = HuginnMLP(config)
        for i in range(1, self.norms + 1):
            setattr(self, f"norm_{i}", HuginnRMSNorm(config.n_embd, config.norm_eps))


class SandwichLayer(HuginnLayer):
    """A layer of Huginn: a norm before each branch, and one on each sum."""

    norms = 4
    norm_1: HuginnRMSNorm
    norm_2: HuginnRMSNorm
    norm_3: HuginnRMSNorm
    norm_4: HuginnRMSNorm

    def forward(self, h: Tensor, context: Context, turn: int = 0) -> Tensor:
        h = _normed_sum(self.attn(self.norm_1(h), context, turn), h, self.norm_2)[1]
        return _normed_sum(self.mlp(self.norm_3(h)), h, self.norm_4)[1]


class LlamaLayer(HuginnLayer):
    """A layer of a retrofitted Llama: a norm before each branch."""

    norm_1: HuginnRMSNorm
    norm_2: HuginnRMSNorm

    def forward(self, h: Tensor, context: Context, turn: int = 0) -> Tensor:
        h, x = _normed_sum(self.attn(self.norm_1(h), context, turn), h, self.norm_2)
        return functional.add(h, self.mlp(x).to(h.dtype))


class Olmo2Layer(HuginnLayer):
    """A layer of a retrofitted OLMo-2: a norm after each branch."""

    norm_1: HuginnRMSNorm
    norm_2: HuginnRMSNorm

    def forward(self, h: Tensor, context: Context, turn: int = 0) -> Tensor:
        h = functional.add(h, self.norm_1(self.attn(h, context, turn), h.dtype))
        return functional.add(h, self.norm_2(self.mlp(h), h.dtype))


def _normed_sum(branch: Tensor, h: Tensor, norm: HuginnRMSNorm) -> tuple[Tensor, Tensor]:
    """h + branch, and the norm of it."""
    if is_plain(norm):
        return functional.sandwich(branch, h, None, norm.weight, norm.eps, norm.eps)
    h = functional.add(h, branch.to(h.dtype))
    return h, norm(h)


LAYERS: dict[str | None, type[HuginnLayer]] = {
    None: SandwichLayer,
    "huginn": SandwichLayer,
    "llama": LlamaLayer,
    "olmo2": Olmo2Layer,
}
"""By the configuration's `layer_layout`."""
