"""Launches of a layer and turn of the native Ouro model, forward and backward, by count.

    python -m benchmarks.launches

Ops that move or compute something, as PyTorch's dispatcher sees them on a CPU, of a turn in the
middle of several: what one more layer adds to one more turn. The way of a GPU is taken: neighbours
through one copy are one product, norms are chained, and a sum of weight gradients that PyTorch
makes there inside a product is not counted. A dual turn's count has the parts of the CPU's blocked
attention in it, where a GPU has four or five kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.counting import Dispatched
from benchmarks.weight_traffic import Matrices
from stars_fast import fused_jsrr, looped_block, ops
from stars_fast.models.low_layers import LowLayers
from stars_fast.models.ouro import OuroConfig, layers
from stars_fast.models.ouro.causal_lm import OuroForCausalLM

WAYS = ("autocast", "copies", "neighbours", "chained")
"""Each with what the ones before have."""


@contextlib.contextmanager
def _as_on_a_gpu(way: str) -> Iterator[None]:
    real, step = ops.low_linears, WAYS.index(way)

    def low_linears(x: Tensor, low: Any, together: int, *, dual: bool) -> tuple[Tensor, ...]:
        return real(x, low, 2 if step > 1 else 1, dual=dual)

    with (
        mock.patch.object(ops, "low_linears", low_linears),
        mock.patch.object(layers, "CHAINED_ON", {"cpu"} if step > 2 else set()),
    ):
        yield


def launches(way: str, depth: int, turns: int, dual: bool) -> int:
    """Those of some turns of a model of `depth` layers, forward and backward, plain or dual."""
    torch.manual_seed(0)
    config = OuroConfig(
        vocab_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=depth,
        num_attention_heads=4,
    )  # fmt: skip
    model: Any = OuroForCausalLM(config).train()
    low = LowLayers(model, [model.model.layers] if way != "autocast" else [])
    low.refresh()
    block = looped_block(model)
    h = torch.randn(1, 8, 32).bfloat16()
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    with _as_on_a_gpu(way), low.used(), Dispatched() as everything, Matrices(matrices) as sums:
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.zeros(())
            for _ in range(turns):
                if dual:
                    loss = loss + fused_jsrr(block, h.detach())
                else:
                    h = block(h)
            loss = loss + h.float().sum()
        loss.backward()
    return everything.launches - sums.found["sum in fp32"]


def of_a_layer_turn(way: str, dual: bool) -> int:
    """Those that one more layer adds to one more turn."""
    signs = {(3, 4): 1, (2, 4): -1, (3, 3): -1, (2, 3): 1}
    pairs = product((3, 2), (4, 3))
    return sum(signs[pair] * launches(way, *pair, dual) for pair in pairs)


def main() -> None:
    print("| launches a layer and turn | plain | dual |\n|---|---|---|")
    for way in WAYS:
        print(
            f"| {way} | " + " | ".join(str(of_a_layer_turn(way, d)) for d in (False, True)) + " |"
        )


if __name__ == "__main__":
    main()
