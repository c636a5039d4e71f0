"""The native Ouro model: a dual turn, a training step, generation; times and memory.

    python -m benchmarks.ouro turn [--layers 1] [--tokens 2048]            # CPU, fp32
    python -m benchmarks.ouro turn step generate --device cuda --dtype bf16 --layers 24

Sizes are those of Ouro-1.4B but for `--layers`; weights are random. `turn`: forward + backward of a
plain and of a dual turn. `step`: a token loss after 4 turns, all targets, and the same with the
Jacobian penalty of the next turn. `generate`: tokens a second after a prompt, by turns. Times are
medians, the ways of a part taking turns. Memory is what the first pass of a way grew the process by
(resident memory; on CUDA what was allocated), each in a process of its own on the CPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.report import show
from benchmarks.timing import interleaved
from benchmarks.ways import figures
from stars_fast import fused_jsrr
from stars_fast.base.machine import commit
from stars_fast.models.looped_block import looped_block
from stars_fast.models.ouro import OuroConfig, OuroForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(options: argparse.Namespace) -> OuroForCausalLM:
    small = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
    sizes = small | {"vocab_size": 320} if options.small else {}
    config = OuroConfig(num_hidden_layers=options.layers, **sizes)
    with torch.device(options.device):
        return OuroForCausalLM(config).to(DTYPES[options.dtype])


def states(net: OuroForCausalLM, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    shape = 1, options.tokens, net.config.hidden_size
    return tuple(torch.randn(shape, device=net.device, dtype=net.dtype) for _ in range(2))


def turn_ways(net: OuroForCausalLM, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    block = looped_block(net.model)
    h, u = states(net, options)
    return {
        "plain": lambda: (block(h) * u).mean(),
        "dual": lambda: fused_jsrr(block, h, v=u, normalize="batch"),
    }


def step_ways(net: OuroForCausalLM, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    ids = torch.randint(3, net.config.vocab_size, (1, options.tokens), device=net.device)
    block = looped_block(net.model)
    net.train()

    def sft() -> Any:
        return net(ids, labels=ids, turns=4).loss

    def stars() -> Any:
        out = net(ids, labels=ids, turns=4, output_hidden_states=True)
        return 0.9 * out.loss + 0.1 * fused_jsrr(block, out.hidden_states[-1])

    def logits() -> Any:
        """The loss from all logits in fp32."""
        whole = net(ids, turns=4).logits[0, :-1].float()
        return torch.nn.functional.cross_entropy(whole, ids[0, 1:])

    return {"plain": sft, "with penalty": stars, "from all logits": logits}


def grown(net: OuroForCausalLM, way: Callable[[], Any]) -> int:
    """MiB of the first forward + backward, gradients included, over what was there before."""
    if net.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        way().backward()
        net.zero_grad(set_to_none=True)
        return round(torch.cuda.max_memory_allocated() / 2**20 - before)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    way().backward()
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before)


def forward_backward(net: OuroForCausalLM, way: Callable[[], Any]) -> None:
    """Forward and backward; the model keeps its gradients."""
    net.zero_grad(set_to_none=True)
    way().backward()


def time_part(part: str, net: OuroForCausalLM, options: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of the ways of a part."""
    ways = {"turn": turn_ways, "step": step_ways}[part](net, options)
    if net.device.type == "cuda":
        memory = {name: grown(net, way) for name, way in ways.items()}
    else:
        memory = {name: _in_its_own_process(part, name) for name in ways}
    runs = {name: partial(forward_backward, net, way) for name, way in ways.items()}
    rows = figures(interleaved(runs, options.repeats, net.device), {})
    print(part)
    show(rows)
    print("MiB:", memory)
    return {"rows": rows, "MiB": memory}


def _in_its_own_process(part: str, way: str) -> int:
    run = [sys.executable, __file__, *sys.argv[1:], "--one", part, way]
    return int(subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True).stdout)


def generation(net: OuroForCausalLM, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of greedy generation, cached, by turns and batch."""
    net.eval()
    rows = []
    new = 8 if options.small else 32
    for batch in (1, 16):
        ids = torch.randint(3, net.config.vocab_size, (batch, 128), device=net.device)
        for turns in (2, 4, 8):
            begin = 0.0
            for limit in (2, new):  # the first warms up
                begin = time.perf_counter()
                net.generate(
                    ids, turns=turns, max_new_tokens=limit, do_sample=False, eos_token_id=None
                )
                if net.device.type == "cuda":
                    torch.cuda.synchronize()
            speed = batch * new / (time.perf_counter() - begin)
            rows.append({"batch": batch, "turns": turns, "tokens/s": round(speed, 1)})
            print("generate", rows[-1], flush=True)
    return {"rows": rows, "prompt": 128, "new": new}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="+", choices=("turn", "step", "generate"))
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny sizes: prove the script")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--one", nargs=2, metavar=("PART", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    net = build_model(options)
    if options.one:
        part, way = options.one
        ways = {"turn": turn_ways, "step": step_ways}[part]
        print(grown(net, ways(net, options)[way]))
        return
    result: dict[str, Any] = {
        "commit": commit(), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "layers": options.layers, "tokens": options.tokens, "dtype": options.dtype,
    }  # fmt: skip
    for part in options.parts:
        result[part] = (
            generation(net, options) if part == "generate" else time_part(part, net, options)
        )
        if options.json:
            with open(options.json, "w") as file:
                json.dump(result, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
