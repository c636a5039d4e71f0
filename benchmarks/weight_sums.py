"""Sums of weight gradients over turns: their error, what they move, and their time on the CPU.

    python -m benchmarks.weight_sums [--turns 1 4 16] [--width 256] [--seeds 3]

Under autocast a weight is cast once and the gradients of all turns add up in the copy's dtype,
bf16, a pass over memory each. With its cache off every turn casts by itself, and they add up in
fp32. `LowLayers` holds the copy, and each product adds to the fp32 gradient. All are held against
fp64: relative L2 errors of the weights' gradients of a native Ouro model (2 layers, 256 tokens),
the mean over matrices and seeds. Then casts and sums of those matrices in a forward and backward,
and its CPU time over that of autocast, the median of alternating runs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.weight_traffic import Matrices
from stars_fast.base.machine import commit
from stars_fast.models.low_layers import LowLayers
from stars_fast.models.ouro import OuroConfig
from stars_fast.models.ouro.causal_lm import OuroForCausalLM

WAYS = ("bf16", "uncached", "copies")
"""Autocast, the same without its cache, and `LowLayers`."""


def backward(model: Any, tokens: Tensor, turns: int, way: str | None) -> None:
    """The gradients of a loss after some turns, one of `WAYS`, or without casts where None."""
    low = LowLayers(model, [model.model.layers] if way == "copies" else [])
    low.refresh()
    context: contextlib.AbstractContextManager = contextlib.nullcontext()
    if way is not None:
        context = torch.autocast("cpu", torch.bfloat16, cache_enabled=way != "uncached")
    with low.used():
        with context:
            loss = model(tokens, labels=tokens, turns=turns).loss
        loss.backward()


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Those of the layers."""
    return [p for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2]


def gradients(model: nn.Module, tokens: Tensor, turns: int, way: str | None) -> list[Tensor]:
    """Gradients of the matrices of the layers in fp64; of the model in fp64 where `way` is None."""
    model = copy.deepcopy(model)
    backward(model if way else model.double(), tokens, turns, way)
    return [p.grad.double() for p in matrices(model) if p.grad is not None]


def relative(found: list[Tensor], expected: list[Tensor]) -> float:
    """The mean over the matrices of the relative L2 distance."""
    pairs = zip(found, expected, strict=True)
    return fmean(((a - b).norm() / b.norm()).item() for a, b in pairs)


def counted(model: nn.Module, tokens: Tensor, turns: int, way: str) -> Matrices:
    """Casts and sums of the matrices."""
    model = copy.deepcopy(model)
    with Matrices(matrices(model)) as found:
        backward(model, tokens, turns, way)
    return found


def ratio(model: nn.Module, tokens: Tensor, turns: int, repeats: int = 9) -> float:
    """CPU time with copies over that of autocast."""
    times: dict[str, list[float]] = {"bf16": [], "copies": []}
    for _ in range(repeats + 1):
        for way, found in times.items():
            model.zero_grad()
            start = time.process_time()
            backward(model, tokens, turns, way)
            found.append(time.process_time() - start)
    return median(times["copies"][1:]) / median(times["bf16"][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    config = OuroConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, commit {commit()}")
    print("| turns | error: bf16 | fp32, cast each turn | copies | casts, sums, fp32 sums: bf16 "
          "| copies | time of copies |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for turns in options.turns:
        rows = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model = OuroForCausalLM(config)
            tokens = torch.randint(0, 256, (2, 128))
            exact = gradients(model, tokens, turns, None)
            rows.append([relative(gradients(model, tokens, turns, way), exact) for way in WAYS])
        means = [f"{fmean(row):.2%}" for row in zip(*rows, strict=True)]
        moved = [counted(model, tokens, turns, way).describe() for way in ("bf16", "copies")]
        cells = [*means, *moved, f"{ratio(model, tokens, turns):.2f}"]
        print(f"| {turns} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
