"""Error that the sum of weight gradients over turns makes in bf16.

    python -m benchmarks.weight_sums [--turns 1 4 16] [--width 256] [--seeds 3]

Under autocast a weight is cast once and the gradients of all turns add up in the copy's dtype,
bf16. With its cache off every turn casts by itself, and they add up in fp32. Both are held against
fp64: relative L2 errors of the weights' gradients of a native Ouro model (2 layers, 256 tokens),
the mean over matrices and seeds, and beside them the distance between the two.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from statistics import fmean

import torch
from torch import Tensor, nn

from stars_fast.models.ouro import OuroConfig
from stars_fast.models.ouro.causal_lm import OuroForCausalLM


def gradients(model: nn.Module, tokens: Tensor, turns: int, cache: bool | None) -> list[Tensor]:
    """Gradients of the matrices of the layers in fp64: by autocast with or without its cache, or,
    where `cache` is None, of the model in fp64."""
    model = copy.deepcopy(model)
    context: contextlib.AbstractContextManager = contextlib.nullcontext()
    if cache is None:
        model.double()
    else:
        context = torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)
    with context:
        loss = model(tokens, labels=tokens, turns=turns).loss
    loss.backward()
    named = model.named_parameters()
    return [p.grad.double() for name, p in named if ".layers." in name and p.dim() == 2]


def relative(found: list[Tensor], expected: list[Tensor]) -> float:
    """The mean over the matrices of the relative L2 distance."""
    pairs = zip(found, expected, strict=True)
    return fmean(((a - b).norm() / b.norm()).item() for a, b in pairs)


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
    print("| turns | summed in bf16 | in fp32 | between the two |\n|---|---|---|---|")
    for turns in options.turns:
        rows = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model = OuroForCausalLM(config)
            tokens = torch.randint(0, 256, (2, 128))
            exact = gradients(model, tokens, turns, None)
            low = gradients(model, tokens, turns, True)
            wide = gradients(model, tokens, turns, False)
            rows.append((relative(low, exact), relative(wide, exact), relative(low, wide)))
        means = [fmean(row) for row in zip(*rows, strict=True)]
        print(f"| {turns} | " + " | ".join(f"{mean:.2%}" for mean in means) + " |", flush=True)


if __name__ == "__main__":
    main()
