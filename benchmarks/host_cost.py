"""Cost of Python: a turn of 24 tiny layers, where the arithmetic takes no time.

    python -m benchmarks.host_cost [--layers 24]
    python -m benchmarks.host_cost --ops [--rank 8]

Milliseconds a turn of Llama layers (Hugging Face's code), of the benchmark's own sandwich layers
and of the native Ouro model (the same layers, written on the ops), d 16, 4 tokens, one CPU thread:
what the host needs before a GPU gets its work. Where the GPU needs less, the turn is bound by the
host; `GraphedBlock` and `train.graphs` are for that. With --ops the ops of PyTorch that a layer of
the native Ouro dispatches: counts, the same on every machine (those of attention are a CPU's);
with --rank beside those of a layer with LoRA adapters on its maps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.blocks import SandwichLayer, stack
from benchmarks.counting import Dispatched
from stars_fast import fused_jsrr, looped_block
from stars_fast.base.machine import commit
from stars_fast.models.low_layers import LowLayers


class LlamaTurn(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama as llama

        config = LlamaConfig(
            hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32
        )
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList(llama.LlamaDecoderLayer(config, 0) for _ in range(layers))
        self.rotary = llama.LlamaRotaryEmbedding(config)

    def forward(self, h: Tensor) -> Tensor:
        tables = self.rotary(h, torch.arange(h.shape[1])[None])
        for layer in self.layers:
            h = layer(h, position_embeddings=tables)
        return h


def ouro_turn(layers: int) -> nn.Module:
    from stars_fast.models.ouro import OuroConfig, OuroModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = OuroConfig(num_hidden_layers=layers, vocab_size=8, **sizes)
    return looped_block(OuroModel(config).eval())


def best(run: Callable[[], object], repeats: int = 15) -> float:
    """Milliseconds of the fastest call."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def adapted_turn(layers: int, rank: int) -> nn.Module:
    """Weights in bf16, adapters in fp32, as the trainer has them under `mixed`."""
    from stars_fast.models.families.ouro import OuroLoop
    from stars_fast.models.lora import LoraConfig, adapt
    from stars_fast.models.ouro import OuroConfig, OuroForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = OuroForCausalLM(OuroConfig(num_hidden_layers=layers, vocab_size=8, **sizes))
    adapt(OuroLoop(model.bfloat16()), LoraConfig(rank=rank), torch.float32, 0)
    return looped_block(model.eval())


def ops_a_layer(dual: bool, low: bool, rank: int | None = None) -> list[int]:
    """Ops of a layer forward, those of them that are launches, and the same backward, in bf16 under
    autocast; with `low` on copies of the weights, as the trainer runs them, with `rank` on
    adapters."""
    counts = []
    for layers in (1, 2):
        block = ouro_turn(layers) if rank is None else adapted_turn(layers, rank)
        copies = LowLayers(block, block.modules() if low else [])
        copies.refresh()
        for p in filter(lambda p: p.requires_grad, block.parameters()):
            p.grad = torch.zeros_like(p)  # as in every micro-batch but the first
        h = torch.randn(1, 4, 16).bfloat16()
        with copies.used():
            with Dispatched() as forward, torch.autocast("cpu", torch.bfloat16):
                loss = fused_jsrr(block, h) if dual else block(h.requires_grad_()).float().sum()
            with Dispatched() as backward:
                loss.backward()
        for each in (forward, backward):
            counts += [each.ops, each.launches]
    return [two - one for one, two in zip(counts[:4], counts[4:], strict=True)]


def print_ops(rank: int | None) -> None:
    print("| turn | forward | launches | backward | launches |")
    print("|---|---|---|---|---|")
    for low in (False, True):
        for dual in (False, True):
            name = ("dual" if dual else "plain") + (", copies of weights" if low else ", autocast")
            print(f"| {name} | " + " | ".join(map(str, ops_a_layer(dual, low))) + " |")
    for dual in (False, True) if rank is not None else ():
        name = f"{'dual' if dual else 'plain'}, LoRA of rank {rank}"
        print(f"| {name} | " + " | ".join(map(str, ops_a_layer(dual, False, rank))) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ops", action="store_true", help="count ops instead")
    parser.add_argument("--rank", type=int, help="of LoRA adapters, to count too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.ops:
        print(f"torch {torch.__version__}, commit {commit()}")
        print_ops(options.rank)
        return
    h = torch.randn(1, 4, 16)
    print(f"{options.layers} layers, torch {torch.__version__}, commit {commit()}")
    print("| block | plain forward | plain both | dual forward | dual both |")
    print("|---|---|---|---|---|")
    blocks = {"Llama": LlamaTurn(options.layers)}
    blocks["sandwich"] = stack(SandwichLayer, options.layers, 16, 2, 32)
    blocks["native Ouro"] = ouro_turn(options.layers)
    for name, block in blocks.items():
        cells = [
            best(lambda b=block: b(h)),
            best(lambda b=block: b(h).sum().backward()),
            best(lambda b=block: fused_jsrr(b, h)),
            best(lambda b=block: fused_jsrr(b, h).backward()),
        ]
        print(f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
