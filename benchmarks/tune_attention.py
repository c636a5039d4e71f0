"""Which tiles the dual attention kernels should take on this GPU.

    python benchmarks/tune_attention.py [--width 128] [--length 4096] [--json FILE]

Tries tile sizes, warps and stages for each kernel of `stars_fast/ops/triton/tiles.py`, one kernel
at a time, on causal bf16 attention of 16 heads: compiled first, in parallel processes, then timed
alone. What does not fit the GPU's shared memory or is not compiled in time is left out. Prints the
best next to the present tile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product

import torch
from triton.testing import do_bench

from stars_fast import ops
from stars_fast.ops.triton import tiles
from stars_fast.ops.triton.tiles import Tile

HEADS = 16


def kernels(width: int) -> tuple[str, ...]:
    return ("forward", "keys", "queries") if width <= 64 else (
        "forward", "keys_v", "keys_k", "queries"
    )  # fmt: skip


def candidates(present: Tile) -> list[Tile]:
    sizes = product((64, 128), (16, 32, 64), (4, 8), (2, 3))
    all_tiles = [Tile(*size, present.slabs) for size in sizes]
    return [present, *(tile for tile in all_tiles if tile != present)]


def inputs(width: int, length: int) -> list[torch.Tensor]:
    shape = 2, 1, HEADS, length, width
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]


def run(kernel: str, leaves: list[torch.Tensor], grad: torch.Tensor | None = None) -> torch.Tensor:
    out = ops.attention(*leaves, causal=True)
    if kernel != "forward":
        torch.autograd.grad(out, leaves, torch.ones_like(out) if grad is None else grad)
    return out


def milliseconds(kernel: str, leaves: list[torch.Tensor]) -> float:
    if kernel == "forward":
        with torch.no_grad():
            return do_bench(lambda: run("forward", leaves), return_mode="median")
    out = ops.attention(*leaves, causal=True)
    grad = torch.randn_like(out)
    return do_bench(
        lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), return_mode="median"
    )


def compile_part(width: int, part: int, parts: int) -> None:
    """Fill the cache of compiled kernels with every `parts`-th candidate."""
    leaves, table = inputs(width, 256), tiles._16_BITS[tiles.architecture(torch.device("cuda"))]
    work = [(k, tile) for k in kernels(width) for tile in candidates(table[k, width])]
    for kernel, tile in work[part::parts]:
        before, table[kernel, width] = table[kernel, width], tile
        try:
            run(kernel, leaves)
            torch.cuda.synchronize()
            print(json.dumps([kernel, *tile]), flush=True)
        except Exception as error:  # whatever does not compile is no candidate
            print(f"{kernel} {tuple(tile)}: {str(error)[:90]}", file=sys.stderr)
        table[kernel, width] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--width", type=int, default=128, choices=(64, 128, 256))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=120, help="for compiling")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        compile_part(options.width, *options.part)
        return
    count = max(1, (os.cpu_count() or 2) - 1)
    command = [sys.executable, __file__, *sys.argv[1:], "--part"]
    with tempfile.TemporaryFile("w+") as ready:
        parts = [
            subprocess.Popen([*command, str(i), str(count)], stdout=ready) for i in range(count)
        ]
        end = time.monotonic() + options.seconds
        for part in parts:
            try:
                part.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                part.kill()
        ready.seek(0)
        compiled = {tuple(json.loads(line)) for line in ready}
    leaves = inputs(options.width, options.length)
    table = tiles._16_BITS[tiles.architecture(torch.device("cuda"))]
    results = {}
    for kernel in kernels(options.width):
        present, timed = table[kernel, options.width], []
        for tile in candidates(present):
            if tile != present and (kernel, *tile) not in compiled:
                continue
            table[kernel, options.width] = tile
            timed.append((milliseconds(kernel, leaves), tuple(tile)))
        before = next(ms for ms, tile in timed if tile == tuple(present))
        timed.sort()
        table[kernel, options.width] = Tile(*timed[0][1])
        results[kernel] = {"present": [before, tuple(present)], "best": timed[:6]}
        print(f"{kernel}: {tuple(present)} {before:.3f} ms; best {timed[:4]}", flush=True)
        if options.json:
            with open(options.json, "w") as file:
                name = torch.cuda.get_device_name()
                head = {"device": name, "width": options.width, "length": options.length}
                json.dump({**head, "kernels": results}, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
