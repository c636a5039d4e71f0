"""A turn of the native Ouro-1.4B, forward and backward: plain and dual, eager and as a CUDA graph,
causal and packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_stages.report import Report
from benchmarks.report import reason
from benchmarks.timing import interleaved, ratio, summary
from stars_fast import GraphedBlock, fused_jsrr
from stars_fast.models.looped_block import looped_block
from stars_fast.models.ouro import OuroConfig, OuroForCausalLM

DOCUMENT = 600
"""Tokens of a packed document."""

Makers = dict[str, Callable[[], Callable[[], None]]]
"""Functions that make a way ready to run, by its name."""


def turns(report: Report, device: str, small: bool) -> None:
    """By length, the causal turn first."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4,
        "num_hidden_layers": 1, "vocab_size": 320,
    } if small else {}  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        net = OuroForCausalLM(OuroConfig(**sizes)).to(torch.bfloat16)
    for tokens in (40,) if small else (2048, 8192, 4096):
        for packed in (False, True):
            name = f"turn of {tokens} tokens, {'packed' if packed else 'causal'}"
            report.attempt(name, partial(turn, report, net, tokens, packed, 1 if small else 3))


def turn(report: Report, net: OuroForCausalLM, tokens: int, packed: bool, repeats: int) -> None:
    """Milliseconds of the two eager ways, then of all four, taking turns; one that fails says
    why. The eager ones are on disk first: a graph that breaks the device takes nothing with it."""
    bounds = None
    if packed:
        starts = [*range(0, tokens, min(DOCUMENT, tokens // 2)), tokens]
        bounds = torch.tensor(starts, dtype=torch.int32, device=net.device)
    block = looped_block(net, cu_seqlens=bounds)
    shape = 1, tokens, net.config.hidden_size
    h, u = (torch.randn(shape, device=net.device, dtype=net.dtype) for _ in range(2))

    def plain(turn: Callable[..., Any]) -> None:
        (turn(h.requires_grad_()) * u).mean().backward()

    def dual(turn: Any) -> None:
        fused_jsrr(turn, h.detach(), v=u, normalize="batch").backward()

    ways: dict[str, Callable[[], None]] = {}
    eager: Makers = {"plain": lambda: partial(plain, block), "dual": lambda: partial(dual, block)}
    graphs: Makers = {
        "plain graph": lambda: partial(plain, graphed(block, h)),
        "dual graph": lambda: partial(dual, GraphedBlock(block, h)),
    }
    for makers in (eager, graphs) if net.device.type == "cuda" else (eager,):
        entry: dict[str, Any] = {"tokens": tokens, "packed": packed, "graphs": makers is graphs}
        for name, make in makers.items():
            try:
                ways[name] = make()
                ways[name]()  # compiles, allocates
            except Exception as error:  # the other ways are worth their figures
                ways.pop(name, None)
                entry[name] = {"failed": reason(error)}
                if name != "plain graph":  # which is no part of the package
                    report.fail(f"turn of {tokens} tokens: {name}: {reason(error)}")
        times = interleaved(ways, repeats, net.device)
        for name, seconds in times.items():
            entry[name] = summary(seconds)
            if "plain" in times:
                entry[name]["over_plain"] = round(ratio(seconds, times["plain"]), 3)
        report.add("turns", entry)
    net.zero_grad(set_to_none=True)


def graphed(block: nn.Module, h: Tensor) -> Callable[..., Any]:
    """A plain turn as a CUDA graph."""
    sample = torch.zeros_like(h).requires_grad_()
    return torch.cuda.make_graphed_callables(_Turn(block), (sample,), allow_unused_input=True)


class _Turn(nn.Module):
    """The block with its state as the only argument."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, h: Tensor) -> Tensor:
        return self.block(h)


def graph_difference(block: nn.Module, h: Tensor, u: Tensor) -> float:
    """The largest relative difference of a gradient of the captured dual turn from the eager."""
    parameters = list(block.parameters())
    graph = GraphedBlock(block, h)
    pairs = zip(
        torch.autograd.grad(fused_jsrr(graph, h, v=u), parameters),
        torch.autograd.grad(fused_jsrr(block, h, v=u), parameters),
        strict=True,
    )
    return max(((a - b).float().norm() / b.float().norm()).item() for a, b in pairs)
