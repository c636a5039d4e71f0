"""Is everything right on this GPU, and how fast is it? Minutes, one JSON file.

    python benchmarks/gpu_check.py [--json FILE] [--device cuda] [--seconds 420] [--small]
    compute-sanitizer python benchmarks/gpu_check.py --small --only correctness

In this order, until the time is up: every kernel of every backend against fp64, in bf16; the native
Ouro model against fp64 on the CPU; time and bandwidth of the row ops; attention against a plain
Triton flash attention (FlexAttention) and SDPA; one Ouro-shaped layer and a turn of 24 of them
against a plain pass, `v^T J` with double backward and torch.func.jvp; the turn as a CUDA graph; a
short training run; the kernels in fp16 and fp32.
The file is written after each entry. Exits with 1 where an error is above its tolerance or a
section failed. `--device cpu --small` runs the same script on the CPU's backends.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from blocks import SandwichLayer, stack
from op_cases import Case, attention_case, attention_cases, rotary_case, row_cases
from torch import Tensor
from ways import WAYS, commit, gradient_errors, measure, show, summary

from stars_fast import GraphedBlock, fused_jsrr, ops
from stars_fast.ops import library

# Relative error in the L2 norm, of outputs and cotangents, on inputs of ordinary size.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}


class Report:
    """What was found, on disk after each entry."""

    def __init__(self, path: str | None, device: str, seconds: float) -> None:
        self.path = None if path is None else Path(path)
        self.end = time.monotonic() + seconds
        self.failures: list[str] = []
        cuda = device == "cuda"
        self.data: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
            "capability": list(torch.cuda.get_device_capability()) if cuda else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _version("triton"),
            "python": platform.python_version(),
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
        }
        self.write()

    def add(self, section: str, entry: dict[str, Any]) -> None:
        self.data.setdefault(section, []).append(entry)
        print(section, json.dumps(entry), flush=True)
        self.write()

    def write(self) -> None:
        if self.path is not None:
            self.data["failures"] = self.failures
            self.path.write_text(json.dumps(self.data, indent=1) + "\n")

    def section(self, name: str, run: Callable[[], None]) -> None:
        """Run a section unless the time is up; its failure is recorded and the next one runs."""
        if time.monotonic() > self.end:
            self.add("skipped", {"section": name, "why": "out of time"})
            return
        try:
            run()
        except Exception as error:  # whatever it is, the rest must still be measured
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            self.write()


def _version(package: str) -> str | None:
    try:
        return __import__(package).__version__
    except ImportError:
        return None


# -- correctness


def results(
    case: Case, function: Callable[..., Any], dtype: torch.dtype, device: str, stacked: bool
) -> list[Tensor]:
    """Output, its tangent and the cotangents of all inputs (halves apart), for one cotangent."""
    rounded = [t.to(device, dtype) for t in (*case.stacks, *case.plains)]
    wide = [t if stacked else t.double() for t in rounded]
    leaves = [t.detach().requires_grad_() for t in wide]
    duals = len(case.stacks)
    if stacked:
        pair = tuple(function(*leaves).unbind(0))
    else:
        pair = torch.func.jvp(
            lambda *x: function(*x, *leaves[duals:]),
            tuple(s[0] for s in leaves[:duals]),
            tuple(s[1] for s in leaves[:duals]),
        )
    generator = torch.Generator().manual_seed(3)
    bars = [torch.randn(y.shape, generator=generator).to(device, dtype).to(y.dtype) for y in pair]
    grads = torch.autograd.grad(pair, leaves, bars)
    halves = [half for grad in grads[:duals] for half in grad]
    return [*pair, *halves, *grads[duals:]]


@contextmanager
def answered() -> Iterator[set[str]]:
    """The backends that answer inside."""
    seen: set[str] = set()
    library.watch(seen.add)
    try:
        yield seen
    finally:
        library.watch(None)


def check(report: Report, case: Case, dtype: torch.dtype, device: str, backend: str) -> None:
    exact = results(case, case.ref, dtype, device, stacked=False)
    with ops.backend(backend), answered() as backends:
        found = results(case, case.op, dtype, device, stacked=True)
    if backend not in ("torch", *backends):
        return  # plain PyTorch stood in
    errors = []
    for mine, truth in zip(found, exact, strict=True):
        mine, truth = mine.double(), truth.double()
        difference, size = (mine - truth).norm().item(), truth.norm().item()
        # Gradients that vanish identically have nothing to be relative to.
        errors.append(difference / size if size > 1e-6 * mine.numel() ** 0.5 else difference)
    worst = max(errors)
    tolerance = TOLERANCE[dtype] * (8 if "offset" in case.name else 1)
    entry = {
        "case": case.name,
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "errors": [float(f"{e:.2e}") for e in errors],
        "ok": worst <= tolerance,
    }
    if not worst <= tolerance:
        report.failures.append(f"{case.name} {backend} {dtype}: {worst:.2e} > {tolerance:.1e}")
    report.add("correctness", entry)


def correctness(report: Report, device: str, small: bool, dtypes: list[torch.dtype]) -> None:
    backends = [b for b in library.BACKENDS if b == "torch" or library.has(b, device)]
    rows = [(5, 33, 70)] if small else [(37, 257, 700), (300, 2048, 5632), (3, 8200, 512)]
    cases = [case for size in rows for case in row_cases(*size)]
    cases += [rotary_case(2, 3, 17, 64), *attention_cases(small)]
    for case in cases:
        for dtype in dtypes:
            for backend in backends:
                interpreted = backend == "triton" and device == "cpu"
                if interpreted and dtype == torch.bfloat16:
                    continue  # Triton's interpreter multiplies the bits of bf16
                if dtype in library.dtypes(backend):
                    name = f"{case.name} {backend} {dtype}"
                    report.section(
                        name, lambda c=case, d=dtype, b=backend: check(report, c, d, device, b)
                    )
    if device == "cuda" and torch.bfloat16 in dtypes and library.has("triton", device):
        report.section("seeding", lambda: seeding(report, device))


def seeding(report: Report, device: str) -> None:
    """The direction that is never stored: its moments, and the sums of squares of its rows."""
    from stars_fast.ops import seed as seeds

    h = torch.randn(4096, 1024, device=device)
    seed = seeds.draw_seed(None, h.device)
    z = seeds.seed_stack(h, seed, torch.ones(4096, device=device))[1].double()
    squares = seeds.normal_squares(seed, h).double()
    entry = {
        "mean": z.mean().item(),
        "variance": z.var().item(),
        "kurtosis": (z**4).mean().item(),
        "squares": ((squares - z.square().sum(-1)).norm() / squares.norm()).item(),
    }
    good = abs(entry["mean"]) < 3e-3 and abs(entry["variance"] - 1) < 5e-3
    good = good and abs(entry["kurtosis"] - 3) < 2e-2 and entry["squares"] < 1e-6
    if not good:
        report.failures.append(f"seeding: {entry}")
    report.add("seeding", entry | {"ok": good})


# -- time


def timed(run: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """Median seconds of a call, on the device's own clock, with a cold cache and without the time
    that the host takes to launch it."""
    for _ in range(3):
        run()
    seconds = []
    flush = torch.empty(2**28, dtype=torch.int8, device=device) if device == "cuda" else None
    for _ in range(repeats):
        if flush is not None:
            flush.zero_()
            torch.cuda._sleep(2_000_000)  # about 1 ms in which the host runs ahead
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def wall(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of a call on a GPU, the host's part included."""
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def both_ways(
    function: Callable[..., Tensor], inputs: list[Tensor], device: str
) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    leaves = [t.detach().requires_grad_() for t in inputs]

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*leaves)

    out = function(*leaves)
    bar = torch.randn_like(out)
    back = timed(lambda: torch.autograd.grad(out, leaves, bar, retain_graph=True), device)
    return timed(forward, device), back


def copy_bandwidth(size: int, dtype: torch.dtype, device: str) -> float:
    """Bytes a second, read and written, of a plain copy."""
    source = torch.empty(size, dtype=dtype, device=device)
    target = torch.empty_like(source)
    return 2 * size * dtype.itemsize / timed(lambda: target.copy_(source), device)


def row_times(report: Report, device: str, dtype: torch.dtype, small: bool) -> None:
    """Each row op, each backend: microseconds and the share of the bandwidth of a copy."""
    bandwidth = copy_bandwidth(2**16 if small else 2**28, dtype, device)
    report.add("copy", {"GB/s": round(bandwidth / 1e9, 1)})
    rows, width, hidden = (64, 256, 704) if small else (8192, 2048, 5632)
    cases = [*row_cases(rows, width, hidden), rotary_case(1, width // 64, rows, 64)]
    for case in cases:
        inputs = [t.to(device, dtype) for t in (*case.stacks, *case.plains)]
        for backend in library.BACKENDS:
            if backend != "torch" and not library.has(backend, device):
                continue
            with ops.backend(backend), answered() as backends:
                forward, backward = both_ways(case.op, inputs, device)
            if backend not in ("torch", *backends):
                continue  # plain PyTorch stood in
            moved = [n * dtype.itemsize for n in case.moved]
            report.add("row ops", {
                "case": case.name, "backend": backend, "shape": [2, rows, width],
                "forward_us": round(1e6 * forward, 1), "backward_us": round(1e6 * backward, 1),
                "forward_of_copy": round(moved[0] / forward / bandwidth, 3),
                "backward_of_copy": round(moved[1] / backward / bandwidth, 3),
            })  # fmt: skip


def attention_times(report: Report, device: str, dtype: torch.dtype, small: bool) -> None:
    """Dual attention against plain attention of the same shape: FlexAttention, which is a Triton
    flash attention, and SDPA."""
    shapes = (
        [(1, 2, 64, 16)] if small else [(1, 16, 2048, 128), (1, 16, 8192, 128), (4, 16, 2048, 64)]
    )
    for batch, heads, length, width in shapes:
        case = attention_case("attention", batch, heads, heads, length, width)
        q, k, v = (t.to(device, dtype) for t in case.stacks)
        entry: dict[str, Any] = {"shape": [batch, heads, length, width]}
        dual = both_ways(lambda q, k, v: ops.attention(q, k, v, causal=True), [q, k, v], device)
        entry["dual_ms"] = [round(1e3 * s, 3) for s in dual]
        peers: dict[str, Callable[..., Tensor]] = {
            "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        }
        if device == "cuda":
            peers["flex"] = flex_attention(length)
        for name, peer in peers.items():
            try:
                times = both_ways(peer, [t[0].contiguous() for t in (q, k, v)], device)
            except Exception as error:  # a peer that does not run here takes nothing with it
                entry[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            entry[f"{name}_ms"] = [round(1e3 * s, 3) for s in times]
            entry[f"over_{name}"] = [round(d / p, 2) for d, p in zip(dual, times, strict=True)]
        report.add("attention", entry)


def flex_attention(length: int) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def block_times(
    report: Report, device: str, dtype: torch.dtype, layers: int, tokens: int, small: bool
) -> None:
    """A block of Ouro-shaped layers, all ways; what does not fit in memory is said."""
    sizes = (64, 4, 176) if small else (2048, 16, 5632)
    block = stack(SandwichLayer, layers, *sizes).to(device, dtype)
    h, u = (torch.randn(1, tokens, sizes[0], device=device, dtype=dtype) for _ in range(2))
    u = u / u.float().square().mean().sqrt().to(dtype)
    ways = {"plain": WAYS["plain"]}
    for name in ("dual", "double_backward", "func_jvp"):
        try:
            WAYS[name](block, h, u).backward()
            ways[name] = WAYS[name]
        except RuntimeError as error:  # out of memory is one
            why = f"{type(error).__name__}: {error}"[:300]
            report.add("left out", {"layers": layers, "tokens": tokens, "way": name, "why": why})
        block.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
    peaks = {}
    if device == "cuda":
        for name, way in ways.items():
            torch.cuda.reset_peak_memory_stats()
            way(block, h, u).backward()
            peaks[name] = round(torch.cuda.max_memory_allocated() / 2**20)
            block.zero_grad(set_to_none=True)
    errors = {}
    if layers == 1 and tokens <= 2048:
        errors = gradient_errors(block, h, u, [name for name in ways if name != "plain"])
    rows = summary(measure(block, h, u, 5, ways), errors)
    show(rows)
    entry = {"layers": layers, "tokens": tokens, "peak_MiB": peaks, "rows": rows}
    if device == "cpu":
        entry["threads"] = torch.get_num_threads()
    report.add("blocks", entry)
    if device == "cuda":
        report.section(f"graph {layers} x {tokens}", lambda: graph_times(report, block, h, u))


def all_block_times(report: Report, device: str, dtype: torch.dtype, small: bool) -> None:
    sizes = [(1, 32), (2, 32)] if small else [(1, 2048), (24, 2048), (1, 8192), (24, 8192)]
    for n, t in sizes:
        report.section(
            f"block {n} x {t}", lambda n=n, t=t: block_times(report, device, dtype, n, t, small)
        )


def graph_times(report: Report, block: torch.nn.Module, h: Tensor, u: Tensor) -> None:
    """The captured turn: equal to the eager one, and its time."""
    parameters = list(block.parameters())
    expected = torch.autograd.grad(fused_jsrr(block, h, v=u), parameters)
    graphed = GraphedBlock(block, h)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(fused_jsrr(graphed, h, v=u), parameters)

    worst = max(
        ((a - b).float().norm() / b.float().norm()).item()
        for a, b in zip(step(), expected, strict=True)
    )
    eager = wall(lambda: torch.autograd.grad(fused_jsrr(block, h, v=u), parameters))
    entry = {
        "layers": len(block), "tokens": h.shape[1], "difference": worst,
        "eager_ms": round(1e3 * eager, 3), "graph_ms": round(1e3 * wall(step), 3),
    }  # fmt: skip
    if worst > 1e-3:
        report.failures.append(f"graph: {worst:.1e} from the eager gradients")
    report.add("graphs", entry)


# -- the Ouro model


def ouro(report: Report, device: str) -> None:
    """The native model: prefill, padding, packing, cache, losses and penalty."""
    from ouro_checks import checks

    for entry in checks(device):
        if not entry["ok"]:
            report.failures.append(f"ouro: {entry}")
        report.add("ouro", entry)


# -- training


def training(report: Report, device: str, small: bool) -> None:
    """A short run of the trainer with the penalty on: it ends, and the loss falls."""
    from stars_fast.training.config import load_config
    from stars_fast.training.metrics import read_metrics
    from stars_fast.training.trainer import train

    steps = 20 if small else 300
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = (
            f"--steps {steps} --warmup_steps 5 --decay_steps 10 --penalty.start_step {steps // 2} "
            f"--penalty.ramp_steps 5 --eval.limit 64 --train.device {device} --out {out}"
        )
        begin = time.perf_counter()
        train(load_config("addition-quick", words.split()))
        seconds = time.perf_counter() - begin
        losses = [row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    entry = {"steps": steps, "seconds": round(seconds, 1), "first": losses[0], "last": losses[-1]}
    if not losses[-1] < losses[0]:
        report.failures.append(f"training: the loss went from {losses[0]} to {losses[-1]}")
    report.add("training", entry)


def methods(report: Report, device: str, small: bool) -> None:
    """Whole training steps of Ouro by every method, over SFT, through the trainer's own step."""
    from method_cost import measure

    if small:
        result = measure("tiny", device, "mixed", 64, 1)
    else:
        result = measure("ouro", device, "mixed", 4096, 3)
    for name, entry in result["methods"].items():
        if not entry["seconds"] > 0:
            report.failures.append(f"methods: {name}: {entry}")
    report.add("methods", result)


# bf16 is what is used: its kernels are compiled, checked and timed before the other dtypes.
SECTIONS = (
    "correctness",
    "ouro",
    "rows",
    "attention",
    "blocks",
    "methods",
    "training",
    "other dtypes",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="write the results here, entry by entry")
    parser.add_argument("--seconds", type=float, default=420, help="start nothing after this")
    parser.add_argument("--small", action="store_true", help="tiny sizes: prove the script")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="sections to run")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --small runs the script on this machine")
    device, small = options.device, options.small
    torch.manual_seed(0)
    report = Report(options.json, device, options.seconds)
    dtype = torch.bfloat16
    runs: dict[str, Callable[[], None]] = {
        "correctness": lambda: correctness(report, device, small, [torch.bfloat16]),
        "other dtypes": lambda: correctness(report, device, small, [torch.float16, torch.float32]),
        "ouro": lambda: ouro(report, device),
        "rows": lambda: row_times(report, device, dtype, small),
        "attention": lambda: attention_times(report, device, dtype, small),
        "blocks": lambda: all_block_times(report, device, dtype, small),
        "methods": lambda: methods(report, device, small),
        "training": lambda: training(report, device, small),
    }
    for name in options.only or SECTIONS:
        report.section(name, runs[name])
    report.write()
    for failure in report.failures:
        print("FAILED", failure)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
