"""The native Ouro model: a dual turn, a training step, generation; times and memory.

    python -m benchmarks.ouro turn [--layers 1] [--tokens 2048]            # CPU, fp32
    python -m benchmarks.ouro turn step generate --device cuda --dtype bf16 --layers 24

Sizes are those of Ouro-1.4B but for `--layers`; weights are random. `turn`: forward + backward of a
plain and of a dual turn. `step`: a token loss after 4 turns, all targets, and the same with the
Jacobian penalty of the next turn. `generate`: tokens a second after a prompt, by turns. Times are
medians, the ways of a part taking turns. Memory is what the first pass of a way grew the process by
(resident memory; on CUDA what was allocated), each in a process of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.machine import DTYPES
from benchmarks.report import show, write
from benchmarks.timing import cuda_growth, in_its_own_process, interleaved, process_growth
from benchmarks.ways import dual, figures, plain
from stars_fast import fused_jsrr
from stars_fast.base.machine import commit
from stars_fast.models.looped_block import looped_block
from stars_fast.models.ouro import OuroConfig, OuroForCausalLM


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
    return {"plain": partial(plain, block, h, u), "dual": partial(dual, block, h, u)}


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


PARTS = {"turn": turn_ways, "step": step_ways}


def growth_of_first_pass(part: str, way: str, settings: dict[str, Any]) -> float:
    """MiB of the first forward + backward of a way, gradients included, over what was there."""
    options = argparse.Namespace(**settings)
    torch.manual_seed(0)
    run = PARTS[part](build_model(options), options)[way]
    growth = cuda_growth if options.device == "cuda" else process_growth
    return round(growth(lambda: run().backward()))


def time_part(part: str, net: OuroForCausalLM, options: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of the ways of a part."""
    ways = PARTS[part](net, options)

    def run(way: Callable[[], Any]) -> None:
        net.zero_grad(set_to_none=True)
        way().backward()

    function = "benchmarks.ouro:growth_of_first_pass"
    memory = {
        name: in_its_own_process(function, part=part, way=name, settings=vars(options))
        for name in ways
    }
    runs = {name: partial(run, way) for name, way in ways.items()}
    rows = figures(interleaved(runs, options.repeats, net.device), {})
    print(part)
    show(rows)
    print("MiB:", memory)
    return {"rows": rows, "MiB": memory}


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
    options = parser.parse_args()
    torch.manual_seed(0)
    net = build_model(options)
    result: dict[str, Any] = {
        "commit": commit(), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "layers": options.layers, "tokens": options.tokens, "dtype": options.dtype,
    }  # fmt: skip
    for part in options.parts:
        result[part] = (
            generation(net, options) if part == "generate" else time_part(part, net, options)
        )
        write(options.json, result)


if __name__ == "__main__":
    main()
