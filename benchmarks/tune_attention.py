"""Which tiles the dual attention kernels should take on this GPU.

    python -m benchmarks.tune_attention [--width 128] [--length 4096] [--json FILE]
    python -m benchmarks.tune_attention --documents 600       # tokens of each packed document
    python -m benchmarks.tune_attention --kv-heads 4          # grouped heads

    python -m benchmarks.tune_attention --backward fused      # tiles of another backward

Times the whole backward by each design of `stars_fast/ops/triton/attention_backward.py`, then
tries tile sizes, warps and stages for each kernel of `stars_fast/ops/triton/tiles.py`, one kernel
at a time, on causal bf16 attention of 16 heads: compiled first, in parallel processes, then timed
alone. What does not fit the GPU's shared memory or is not compiled in time is left out. Prints the
best next to the present tile. `--device cpu --small` proves the script in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stars_fast import ops
from stars_fast.ops.triton import tiles
from stars_fast.ops.triton.attention_backward import DESIGNS, OVERRIDE
from stars_fast.ops.triton.tiles import JOINT_WIDTH, TWO_PROGRAMS, Tile

HEADS = 16


def tuned_kernels(width: int, backward: str = "split") -> tuple[str, ...]:
    """Those with tiles in `tiles.py`, of the forward and of a design of the backward."""
    joint = width <= JOINT_WIDTH
    if backward == "fused":
        return ("forward", "fused") if joint else ("forward", "keys_v", "fused_k")
    keys = ("keys",) if joint else ("keys_v", "keys_k")
    return ("forward", *keys, "queries") if backward == "split" else ("forward",)


def candidates(kernel: str, width: int, present: Tile, small: bool) -> list[Tile]:
    """The present tile first, then what may be best."""
    if small:
        tried = [Tile(16, 16, 4, 1, present.slabs)]
    else:
        sizes = product((64, 128), (16, 32, 64), (4, 8), (2, 3))
        tried = [Tile(*size, present.slabs) for size in sizes]
        if (kernel, width) in TWO_PROGRAMS:
            tried.insert(0, TWO_PROGRAMS[kernel, width])
    return list(dict.fromkeys((present, *tried)))


@contextmanager
def backward_by(design: str) -> Iterator[None]:
    """Inside, the backward is by this design."""
    before = os.environ.get(OVERRIDE)
    os.environ[OVERRIDE] = design
    try:
        yield
    finally:
        del os.environ[OVERRIDE]
        if before is not None:
            os.environ[OVERRIDE] = before


class TiledAttention:
    """Inputs, and the table of tiles that their kernels are picked from."""

    def __init__(self, options: argparse.Namespace, length: int) -> None:
        self.options = options
        device = torch.device(options.device)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        heads, kv_heads = HEADS, options.kv_heads
        if options.small:
            heads, kv_heads = 2, 1
        self.leaves = [
            torch.randn(2, 1, n, length, options.width, device=device, dtype=self.dtype)
            for n in (heads, kv_heads, kv_heads)
        ]
        self.spans = None
        if options.documents:
            bounds = [*range(0, length, options.documents), length]
            at = torch.tensor(bounds, device=device)
            self.spans = ops.Spans.of_documents(at, at, length, length, True)
        if not DESIGNS[options.backward].takes(self.leaves[0]):
            raise ValueError(
                f"--backward: expected a design that takes these inputs, got {options.backward!r}"
            )
        self.table = tiles.table(self.leaves[0])

    def run(self, kernel: str) -> Callable[[], Any]:
        """The forward, or the backward with all its kernels."""
        leaves = [x.requires_grad_() for x in self.leaves]
        if kernel == "forward":
            return lambda: self.attend([x.detach() for x in leaves])
        out = self.attend(leaves)
        grad = torch.randn_like(out)

        def backward() -> Any:
            with ops.backend("triton"):
                return torch.autograd.grad(out, leaves, grad, retain_graph=True)

        return backward

    def attend(self, leaves: list[Tensor]) -> Tensor:
        with ops.backend("triton"):
            return ops.attention(*leaves, causal=self.spans is None, spans=self.spans)

    def milliseconds(self, kernel: str) -> float:
        run = self.run(kernel)
        if self.options.device == "cpu":
            begin = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - begin)
        from triton.testing import do_bench

        return do_bench(run, warmup=10, rep=40, return_mode="median")

    def designs(self) -> dict[str, float]:
        """Milliseconds of the backward by each design that takes the inputs."""
        found = {}
        for name, design in DESIGNS.items():
            if design.takes(self.leaves[0]):
                with backward_by(name):
                    found[name] = self.milliseconds("backward")
        return found


def compile_part(options: argparse.Namespace, part: int, parts: int) -> None:
    """Fill the cache of compiled kernels with every `parts`-th candidate."""
    width = options.width
    case = TiledAttention(options, min(options.length, 256))
    table = case.table
    work = [
        (k, tile)
        for k in tuned_kernels(width, options.backward)
        for tile in candidates(k, width, table[k, width], options.small)
    ]
    for kernel, tile in work[part::parts]:
        before, table[kernel, width] = table[kernel, width], tile
        try:
            with backward_by(options.backward):
                case.run(kernel)()
            if options.device == "cuda":
                torch.cuda.synchronize()
            print(json.dumps([kernel, *tile]), flush=True)
        except Exception as error:  # whatever does not compile is no candidate
            print(f"{kernel} {tuple(tile)}: {str(error)[:90]}", file=sys.stderr)
        table[kernel, width] = before


def compiled(options: argparse.Namespace) -> set[tuple[Any, ...]]:
    """The candidates that compile within the time, by processes beside each other."""
    if options.small:  # the interpreter compiles nothing
        table = TiledAttention(options, 16).table
        return {
            (k, *tile)
            for k in tuned_kernels(options.width, options.backward)
            for tile in candidates(k, options.width, table[k, options.width], True)
        }
    count = max(1, (os.cpu_count() or 2) - 1)
    command = [sys.executable, __file__]
    for name in ("width", "length", "kv_heads", "documents", "device", "backward"):
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    with tempfile.TemporaryFile("w+") as ready:
        parts = [
            subprocess.Popen([*command, "--part", str(i), str(count)], stdout=ready)
            for i in range(count)
        ]
        end = time.monotonic() + options.seconds
        for part in parts:
            try:
                part.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                part.kill()
                part.wait()
        ready.seek(0)
        return {tuple(json.loads(line)) for line in ready if line.endswith("\n")}


def tune(options: argparse.Namespace, found: Callable[[str, dict[str, Any]], None]) -> None:
    """Calls `found("designs", {name: ms, ...})` for the backward, then `found(kernel, {"present":
    [ms, tile], "best": [[ms, tile], ...]})` for each kernel as soon as it has been timed. The best
    tiles stay in the table of this process."""
    end = time.monotonic() + options.until
    known = compiled(options)
    case, width = TiledAttention(options, options.length), options.width
    found("designs", case.designs())
    for kernel in tuned_kernels(width, options.backward):
        present, timed = case.table[kernel, width], []
        for tile in candidates(kernel, width, present, options.small):
            late = timed and time.monotonic() > end
            if late or (tile != present and (kernel, *tile) not in known):
                continue
            case.table[kernel, width] = tile
            with backward_by(options.backward):
                timed.append((case.milliseconds(kernel), tuple(tile)))
        before = timed[0][0]  # the present tile comes first
        timed.sort()
        case.table[kernel, width] = Tile(*timed[0][1])
        found(kernel, {"present": [before, tuple(present)], "best": timed[:6]})


def parser() -> argparse.ArgumentParser:
    """The options; `TiledAttention` and `tune` take them."""
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    found.add_argument("--width", type=int, default=128, choices=(64, 128, 256))
    found.add_argument("--length", type=int, default=4096)
    found.add_argument("--kv-heads", type=int, default=HEADS)
    found.add_argument("--documents", type=int, default=0, help="tokens of each packed document")
    found.add_argument("--backward", default="split", choices=tuple(DESIGNS), help="its design")
    found.add_argument("--seconds", type=float, default=120, help="for compiling")
    found.add_argument("--until", type=float, default=600, help="seconds for all of it")
    found.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    found.add_argument("--small", action="store_true", help="tiny sizes: prove the script")
    found.add_argument("--json", help="write the result here")
    found.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    return found


def main() -> None:
    options = parser().parse_args()
    if options.part:
        compile_part(options, *options.part)
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else "interpreter"
    result: dict[str, Any] = {"device": name, "width": options.width, "length": options.length}
    result |= {"kv_heads": options.kv_heads, "documents": options.documents, "kernels": {}}

    def found(kernel: str, row: dict[str, Any]) -> None:
        result["kernels"][kernel] = row
        print(f"{kernel}: {json.dumps(row)}", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n")

    tune(options, found)


if __name__ == "__main__":
    main()
