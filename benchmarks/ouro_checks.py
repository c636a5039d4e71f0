"""Checks of the native Ouro model on a device: each result against fp64 on the CPU, beside the
error that the same model makes on the CPU in the same dtype."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stars_fast import fused_jsrr
from stars_fast.models.looped_block import looped_block
from stars_fast.models.low_layers import LowLayers
from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.models.ouro.tiny import write_tiny_ouro

TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": 320,
}  # fmt: skip
LENGTHS = (37, 1, 70)
# Times the error of the CPU in the same dtype, and where that is tiny.
SLACK, FLOOR = 3.0, {torch.float32: 3e-5, torch.bfloat16: 2e-2}


def _ids(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (batch, length), generator=generator)


def _logits(net: OuroForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    moved = {k: v.to(net.device) if isinstance(v, Tensor) else v for k, v in options.items()}
    with torch.no_grad():
        return net(ids.to(net.device), turns=3, **moved).logits


def _gradients(net: OuroForCausalLM, loss: Tensor) -> Tensor:
    wanted = [p for p in net.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return torch.cat([g.double().flatten().cpu() for g in grads if g is not None])


def prefill(net: OuroForCausalLM) -> Tensor:
    return _logits(net, _ids(2, 90))


def padded(net: OuroForCausalLM) -> Tensor:
    mask = torch.ones(2, 90, dtype=torch.int64)
    mask[0, :33] = 0
    return _logits(net, _ids(2, 90), attention_mask=mask)[mask.bool().to(net.device)]


def packed(net: OuroForCausalLM) -> Tensor:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    return _logits(net, _ids(1, sum(LENGTHS)), cu_seqlens=bounds)


def in_chunks(net: OuroForCausalLM) -> Tensor:
    """The same prompt through the cache, in unequal chunks."""
    ids, cache, parts = _ids(2, 90).to(net.device), None, []
    with torch.no_grad():
        for start, stop in ((0, 50), (50, 51), (51, 90)):
            out = net(ids[:, start:stop], turns=3, use_cache=True, past_key_values=cache)
            cache = out.get("cache", out.get("past_key_values"))
            parts.append(out.logits)
    return torch.cat(parts, 1)


def loss_gradients(net: OuroForCausalLM) -> Tensor:
    ids = _ids(2, 90).to(net.device)
    return _gradients(net, net(ids, labels=ids, turns=3, skip_logits=True).loss)


def packed_gradients(net: OuroForCausalLM) -> Tensor:
    ids, bounds = _ids(1, sum(LENGTHS)).to(net.device), torch.tensor([0, *LENGTHS]).cumsum(0)
    return _gradients(net, net(ids, labels=ids, turns=3, cu_seqlens=bounds, skip_logits=True).loss)


def _jsrr(net: OuroForCausalLM, batch: int, length: int, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    h, v = (
        torch.randn(batch, length, 256, generator=generator).to(torch.bfloat16) for _ in range(2)
    )
    h, v = (x.to(net.device, net.dtype) for x in (h, v))
    loss = fused_jsrr(looped_block(net, **options), h, v=v, normalize="batch")
    return torch.cat((loss.double().view(1).cpu(), _gradients(net, loss)))


def jsrr(net: OuroForCausalLM) -> Tensor:
    return _jsrr(net, 2, 90)


def jsrr_packed(net: OuroForCausalLM) -> Tensor:
    return _jsrr(net, 1, sum(LENGTHS), cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))


def copies(net: OuroForCausalLM) -> Tensor:
    """Gradients of loss and penalty in mixed precision, through copies of the weights; of a net in
    fp64 its own."""
    device, exact = net.device, net.dtype == torch.float64
    net = copy.deepcopy(net) if exact else copy.deepcopy(net).float()
    low = LowLayers(net, [] if exact else [net.model.layers])
    low.refresh()
    ids = _ids(2, 90).to(device)
    generator = torch.Generator().manual_seed(5)
    v = torch.randn(2, 90, 256, generator=generator).to(device, net.dtype)
    with low.used():
        with torch.autocast(device.type, torch.bfloat16, enabled=not exact):
            out = net(ids, labels=ids, turns=3, output_hidden_states=True, skip_logits=True)
            h = out.hidden_states[-1].detach()
            loss = out.loss + fused_jsrr(looped_block(net), h, v=v.to(h.dtype), normalize="batch")
        loss.backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return torch.cat([g.double().flatten().cpu() for g in grads])


CHECKS: tuple[Callable[[OuroForCausalLM], Tensor], ...] = (
    prefill, padded, packed, in_chunks, loss_gradients, packed_gradients, jsrr, jsrr_packed,
    copies,
)  # fmt: skip


def _error(mine: Tensor, exact: Tensor) -> float:
    return ((mine.double().cpu() - exact).norm() / exact.norm()).item()


def checks(
    device: str, dtypes: Sequence[torch.dtype], attentions: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One entry a check, dtype and attention implementation: errors, and whether they are right."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_ouro(f"{folder}/tiny", **TINY)
        exact = OuroForCausalLM.from_pretrained(f"{folder}/tiny", dtype=torch.float64)
    # In reduced precision all start from the same rounded weights.
    exact.to(torch.bfloat16).double()
    truths = {check: check(exact).double() for check in CHECKS}
    for dtype in dtypes:
        here = copy.deepcopy(exact).to(dtype)
        there = copy.deepcopy(here).to(device)
        own = {check: _error(check(here), truth) for check, truth in truths.items()}
        for attention in attentions:
            there.set_attn_implementation(attention)
            for check, truth in truths.items():
                if attention != "sdpa" and check in (jsrr, jsrr_packed, copies):
                    continue  # the dual turn is the same
                error = _error(check(there), truth)
                yield {
                    "check": check.__name__, "dtype": str(dtype).removeprefix("torch."),
                    "attention": attention, "error": float(f"{error:.2e}"),
                    "cpu_error": float(f"{own[check]:.2e}"),
                    "ok": error <= max(SLACK * own[check], FLOOR[dtype]),
                }  # fmt: skip
