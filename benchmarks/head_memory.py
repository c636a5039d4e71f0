"""Peak memory and time of a language model's head: logits, loss and both gradients.

    python -m benchmarks.head_memory [--dtypes fp32 bf16] [--device cuda] [--ways plain ours]
        [--tokens 4096] [--vocabulary 49152] [--width 2048] [--repeats 3] [--json FILE]

`plain` is F.linear + F.cross_entropy in fp32 on every position, `ours` is `linear_cross_entropy`;
`liger` is the same with backend="liger" (CUDA). The share is that of supervised positions: plain
computes the logits of the others too. Each cell is a process of its own. Memory is what it grew by,
at its peak, over the state before the first pass (resident memory; on CUDA what was allocated),
gradients included. Time is the median of later passes.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import DTYPES
from benchmarks.report import write
from benchmarks.timing import cuda_growth, in_its_own_process, process_growth, wall_clock
from stars_fast.base.machine import commit
from stars_fast.ops.linear_cross_entropy import linear_cross_entropy, supervised_positions

HEAD_WAYS = ("plain", "ours", "liger")


def measure_head(
    way: str,
    dtype: str,
    share: float,
    device: str,
    tokens: int,
    vocabulary: int,
    width: int,
    repeats: int,
    threads: int | None,
) -> dict[str, float]:
    """MiB that the process grows by in one forward + backward, and seconds of another."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)

    def inputs(tokens: int, vocabulary: int, width: int) -> tuple[Tensor, ...]:
        kind = {"dtype": DTYPES[dtype], "device": device}
        hidden = torch.empty(1, tokens, width, **kind).normal_().requires_grad_()
        weight = torch.empty(vocabulary, width, **kind).normal_(std=0.02).requires_grad_()
        labels = torch.randint(0, vocabulary, (1, tokens))
        labels[:, : tokens - round(share * tokens)] = -100
        positions = supervised_positions(labels)
        return hidden, weight, labels.to(device), positions.to(device)

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, positions: Tensor) -> None:
        hidden.grad = weight.grad = None
        if way == "plain":
            logits = F.linear(hidden, weight).float()
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            return
        backend = "liger" if way == "liger" else None
        loss = linear_cross_entropy(hidden, weight, labels, supervised=positions, backend=backend)
        loss.loss.backward()

    run(*inputs(16, 64, 32))  # what loads once is not the pass's own
    full = inputs(tokens, vocabulary, width)
    clock, first = wall_clock(device), []
    growth = cuda_growth if device == "cuda" else process_growth
    mib = growth(lambda: first.append(clock(lambda: run(*full))))
    times = [clock(lambda: run(*full)) for _ in range(repeats)] or first
    return {"MiB": round(mib, 1), "s": round(statistics.median(times), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ways", nargs="+", default=["plain", "ours"], choices=HEAD_WAYS)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=list(DTYPES))
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.25])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3, help="0: time the first pass")
    parser.add_argument("--threads", type=int, help="of the CPU; torch's default otherwise")
    parser.add_argument("--json", help="write the result here")
    options = parser.parse_args()
    names = ("device", "tokens", "vocabulary", "width", "repeats", "threads")
    sizes = {name: getattr(options, name) for name in names}
    print("| head | dtype | supervised | peak, MiB | time, ms |")
    print("|---" * 5 + "|", flush=True)
    rows = []
    for dtype in options.dtypes:
        for way in options.ways:
            for share in options.shares[:1] if way == "plain" else options.shares:
                cell = {"way": way, "dtype": dtype, "share": share}
                function = "benchmarks.head_memory:measure_head"
                row = cell | in_its_own_process(function, **cell, **sizes)
                rows.append(row)
                print(
                    f"| {way} | {dtype} | {share:.0%} | {row['MiB']:.0f} | {1000 * row['s']:.0f} |",
                    flush=True,
                )
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    result = {"options": settings, "rows": rows}
    write(options.json, {"commit": commit(), **result})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
