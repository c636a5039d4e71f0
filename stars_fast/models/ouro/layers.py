"""The layers of Ouro, written once for tensors and for pairs of primal and tangent.

    h = h + N2(attention(N1(h)))        h = h + N4(mlp(N3(h)))

Every op is one of `stars_fast.functional`, or a linear map. A layer needs no weights but its own,
so that it can be sharded, checkpointed and moved by itself; where nothing of that is done, the norm
that closes a layer and the next layer's first are one op (`chained`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stars_fast import functional
from stars_fast.models.ouro.attention import attend
from stars_fast.models.ouro.config import OURO_ACTIVATIONS, OuroConfig
from stars_fast.models.plain_linear import gated_mlp, is_plain, project_attention, project_merged

if TYPE_CHECKING:
    from stars_fast.models.ouro.context import Context


class OuroRMSNorm(nn.Module):
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


class OuroAttention(nn.Module):
    """Causal attention with rotary positions and grouped heads, [.., B, S, D] -> [.., B, S, D]."""

    joint = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: OuroConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.head_dim = config.head_dim
        self.is_causal = True
        self.scaling = config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.kind = config.layer_types[layer]
        width, kv = (
            heads * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context, turn: int) -> Tensor:
        context = context.on(x.device)
        tables = context.cos, context.sin
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = project_attention(*maps, x, self.head_dim, tables)
        if context.cache is not None:
            k, v = context.cache.append(k, v, turn, self.layer_idx, context.rows)
        out = attend(self, q, k, v, context.visible[self.kind])
        return project_merged(self.o_proj, out)


class OuroMLP(nn.Module):
    """down(f(gate(x)) * up(x)), [.., D] -> [.., D]."""

    joint = (("gate_proj", "up_proj"),)

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.activation = OURO_ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return gated_mlp(self.gate_proj, self.up_proj, self.down_proj, x, self.activation)


class OuroDecoderLayer(nn.Module):
    """One layer of the shared block, h [.., B, S, D] -> [.., B, S, D]."""

    def __init__(self, config: OuroConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = OuroAttention(config, layer)
        self.mlp = OuroMLP(config)
        size = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = OuroRMSNorm(*size)
        self.input_layernorm_2 = OuroRMSNorm(*size)
        self.post_attention_layernorm = OuroRMSNorm(*size)
        self.post_attention_layernorm_2 = OuroRMSNorm(*size)

    def forward(self, h: Tensor, context: Context, turn: int = 0) -> Tensor:
        h, branch = self._branches(h, self.input_layernorm(h), context, turn)
        return functional.add(h, self.post_attention_layernorm_2(branch, h.dtype))

    def chained(
        self, h: Tensor, x: Tensor, following: OuroRMSNorm, context: Context, turn: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The layer between norms: from h and x = N1(h) to the h after it and `following` of that,
        the first norm of the next layer or the closing one, in one pass over memory."""
        h, branch = self._branches(h, x, context, turn)
        out = self.post_attention_layernorm_2
        weights = out.weight, following.weight
        return functional.sandwich(branch, h, *weights, out.eps, following.eps)

    def _branches(self, h: Tensor, x: Tensor, context: Context, turn: int) -> tuple[Tensor, Tensor]:
        """h after attention, and what the MLP gives."""
        branch = self.self_attn(x, context, turn)
        out, into = self.input_layernorm_2, self.post_attention_layernorm
        if is_plain(out) and is_plain(into):  # h + N2(branch) and N3 of it in one
            h, x = functional.sandwich(branch, h, out.weight, into.weight, out.eps, into.eps)
        else:
            h = functional.add(h, out(branch, h.dtype))
            x = into(h)
        return h, self.mlp(x)


CHAINED_ON = {"cuda"}
"""Devices whose layers run `chained`: on the CPU it makes no difference that can be measured."""


def can_chain(layers: Iterable[nn.Module], norm: nn.Module, device: torch.device) -> bool:
    """Whether layers run by `chained`, the last before `norm`: it pays on the device, nothing waits
    for a call of a layer or norm (hooks, FSDP, torch.compile), and a layer may read the next one's
    weights."""
    if device.type not in CHAINED_ON:
        return False
    norms = [norm]
    for layer in layers:
        if type(layer) is not OuroDecoderLayer or layer._compiled_call_impl is not None:
            return False
        if not is_plain(layer):
            return False
        norms += [layer.input_layernorm, layer.post_attention_layernorm_2]
    return all(type(each) is OuroRMSNorm and is_plain(each) for each in norms)
