"""The layers of Ouro, written once for tensors and for stacked pairs of primal and tangent.

    h = h + N2(attention(N1(h)))        h = h + N4(mlp(N3(h)))

`dual=True` says that the tensors are stacks [2, ...] of a `stars_fast.Dual`; every op is one of
`stars_fast.ops`, or a linear map. A layer needs no weights but its own, so that it can be sharded,
checkpointed and moved by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stars_fast import ops
from stars_fast.dual.registry import report
from stars_fast.dual.tensor import Dual
from stars_fast.models.ouro.attention import attend
from stars_fast.models.ouro.config import ACTIVATIONS, OuroConfig

if TYPE_CHECKING:
    from stars_fast.models.ouro.context import Context


class OuroRMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, dual: bool = False) -> Tensor:
        if dual:
            report("rms_norm", "fused")
        return ops.rms_norm(x, self.weight, self.eps, dual=dual)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is its weight and bias and nothing else: no adapter, no hook, not
    quantised or sharded by itself."""
    return type(module) is nn.Linear and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    )


def project(module: nn.Module, x: Tensor, dual: bool) -> Tensor:
    """A linear map. Whatever stands in for a plain one (quantised, adapted, biased, hooked) meets a
    Dual and is answered op by op."""
    if not dual:
        return module(x)
    if is_plain_linear(module) and module.bias is None:
        report("linear", "stacked")
        return module(x)
    return module(Dual(x)).stack


def add_norm(
    branch: Tensor, residual: Tensor, out: OuroRMSNorm, into: OuroRMSNorm, dual: bool
) -> tuple[Tensor, Tensor]:
    """h = residual + N_out(branch) and N_in(h), in one pass over memory."""
    if dual:
        report("sandwich", "fused")
    branch = branch.to(residual.dtype)
    return ops.sandwich(branch, residual, out.weight, into.weight, out.eps, into.eps, dual=dual)


class OuroAttention(nn.Module):
    """Causal attention with rotary positions and grouped heads, [.., B, S, D] -> [.., B, S, D]."""

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

    def forward(self, x: Tensor, context: Context, turn: int, dual: bool = False) -> Tensor:
        context = context.on(x.device)
        q, k, v = (
            project(p, x, dual).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if dual:
            report("rotary", "fused")
            report("attention", "fused")
        q, k = (ops.rotary(each, context.cos, context.sin) for each in (q, k))
        if context.cache is not None:
            k, v = context.cache.append(k, v, turn, self.layer_idx, context.rows)
        out = attend(self, q, k, v, context.visible[self.kind], dual)
        return project(self.o_proj, out.transpose(-3, -2).flatten(-2), dual)


class OuroMLP(nn.Module):
    """down(f(gate(x)) * up(x)), [.., D] -> [.., D]."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, dual: bool = False) -> Tensor:
        g, u = project(self.gate_proj, x, dual), project(self.up_proj, x, dual)
        if dual:
            report(f"gated {self.activation}", "fused")
        return project(self.down_proj, ops.gated(g, u, self.activation, dual=dual), dual)


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

    def forward(self, h: Tensor, context: Context, turn: int = 0, dual: bool = False) -> Tensor:
        branch = self.self_attn(self.input_layernorm(h, dual), context, turn, dual)
        h, x = add_norm(branch, h, self.input_layernorm_2, self.post_attention_layernorm, dual)
        if dual:
            report("add", "stacked")
        return h + self.post_attention_layernorm_2(self.mlp(x, dual).to(h.dtype), dual)
