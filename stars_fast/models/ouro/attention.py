"""Attention of a turn: PyTorch's or an installed kernel library's for tensors, ours for pairs."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast import functional
from stars_fast.dual.tensor import Dual
from stars_fast.models.ouro.visible import Visible


class Attention(Protocol):
    """The part of an attention module that is read here."""

    config: Any
    scaling: float


@torch.compiler.disable  # its kernels are compiled already, and packed documents differ each time
def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """[B, H, S, D] from q [B, H, S, D], k and v [B, Hkv, past + S, D], tensors or pairs.

    `module` gives `scaling` and, for tensors, the `config` whose `_attn_implementation` is used.
    """
    scale = module.scaling
    if type(q) is Dual:
        if visible.holes:
            return functional.attention(q, k, v, visible.mask, scale=scale)
        if visible.spans is None:
            return functional.attention(q, k, v, causal=True, scale=scale)
        return functional.attention(q, k, v, scale=scale, spans=visible.spans)
    implementation = module.config._attn_implementation
    if implementation in ("sdpa", "eager", None):
        if visible.tokens.packed and implementation != "eager":
            return _packed(q, k, v, visible)
        plain = _eager if implementation == "eager" else _sdpa
        return plain(q, k, v, visible, scale)
    return _interface(implementation, module, q, k, v, visible)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    mask = visible.mask
    causal = mask is None and bool(q.shape[2] > 1)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _eager(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """From its parts, with the weights in memory."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    mask = visible.mask
    if mask is None:
        ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = ones.tril(k.shape[2] - q.shape[2])
    logits = (q @ k.mT) * scale
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1, dtype=wide)
    return weights.to(q.dtype) @ v


def _packed(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """Documents of one row, each by itself, at the default scale D^-1/2: one kernel where PyTorch
    has it, else one call each, or with a mask where the host is not to ask for their lengths."""
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return _varlen(q, k, v, visible)
    if visible.tokens.longest is not None:
        return _sdpa(q, k, v, visible, q.shape[-1] ** -0.5)
    grouped = q.shape[1] != k.shape[1]
    lengths, window = visible.tokens.lengths, visible.window
    # Split rather than sliced: the backward of a slice fills a tensor of the whole row.
    parts = zip(lengths, *(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    outs = []
    for length, a, b, c in parts:
        if not length:
            continue
        mask = None
        if window is not None and window < length:
            ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
            mask = ones.tril().triu(1 - window)
        outs.append(
            F.scaled_dot_product_attention(
                a, b, c, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
        )
    return torch.cat(outs, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """Attention by torch's kernel for packed documents; its options differ between versions."""
    from torch.nn.attention import varlen

    kernel: Any = varlen.varlen_attn
    window = visible.window
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]  # [S, H, D]
    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _parameters(kernel):
            options["enable_gqa"] = True
        else:
            groups = q.shape[1] // k.shape[1]
            tokens[1:] = [x.repeat_interleave(groups, 1) for x in tokens[1:]]
    if "window_size" in _parameters(kernel):
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise RuntimeError(f"torch {torch.__version__}: its varlen_attn takes no sliding window")
    cu, longest = visible.cu_seqlens, visible.longest
    out = kernel(*tokens, cu, cu, longest, longest, **options)
    return out.transpose(0, 1).unsqueeze(0)


@cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _interface(
    name: str, module: Attention, q: Tensor, k: Tensor, v: Tensor, visible: Visible
) -> Tensor:
    """An attention of transformers' registry: flash-attn in its versions, FlexAttention, ..."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    options: dict[str, Any] = {}
    mask: Any = None if visible.tokens.packed else visible.tokens.real
    if name == "flex_attention":
        mask = visible.flex_mask(q.shape[2], k.shape[2], q.device)
    elif visible.tokens.packed:
        cu, longest = visible.cu_seqlens, visible.longest
        options = {
            "cu_seq_lens_q": cu, "cu_seq_lens_k": cu,
            "max_length_q": longest, "max_length_k": longest,
        }  # fmt: skip
    elif visible.tokens.restarts is not None:
        raise ValueError(
            f"attn_implementation {name!r} needs cu_seqlens for packed documents; position_ids "
            "alone are understood by sdpa, eager and flex_attention"
        )
    out, _ = ALL_ATTENTION_FUNCTIONS[name](
        module, q, k, v, mask,
        dropout=0.0, scaling=module.scaling, sliding_window=visible.window, **options,
    )  # fmt: skip
    return out.transpose(1, 2)
