"""Is everything right on this GPU, how fast is it, and does it train? One JSON file.

    python benchmarks/gpu_check.py [--json FILE] [--only STAGE ...]
    python benchmarks/gpu_check.py --device cpu --small           # proves the script
    compute-sanitizer python benchmarks/gpu_check.py --stage kernels --small

Stages, each a process of its own with a time budget; what one does not use goes to the next, and
one that does not end in time is killed, with what it started:

    kernels    every kernel of every backend against fp64, in bf16; the native Ouro model against
               fp64 on the CPU
    timing     ops and blocks at Ouro's shapes against their peers; a turn as a CUDA graph
    steps      whole training steps of Ouro-1.4B with random weights, the published way and ours
    addition   the paper's addition run, as many of its 10,000 steps as fit; accuracy by turns
    dtypes     the kernels in fp16 and fp32 (only if asked for)

The file is written after each entry. Exits with 1 where an error is above its tolerance or a stage
failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stars_fast import GraphedBlock, fused_jsrr
from stars_fast.bench import block as block_level
from stars_fast.bench import growth, machine, op
from stars_fast.bench.blocks import SHAPES, build
from stars_fast.bench.cases import (
    Case,
    attention_cases,
    backends,
    errors,
    rotary_case,
    row_cases,
)
from stars_fast.bench.report import FULL, reason, show
from stars_fast.bench.timing import interleaved, summary
from stars_fast.bench.ways import COMPILED, NAMES, OURS, missing
from stars_fast.ops import library

BUDGETS = {"kernels": 100.0, "timing": 160.0, "steps": 120.0, "addition": 80.0, "dtypes": 120.0}
"""Seconds; without `dtypes`, which is run only if it is asked for, 460 in all."""
COMPILING = 50.0
"""Seconds that a way under torch.compile may take: it is tried in a process of its own first."""
GRACE = 10.0
"""Seconds that a stage gets to end what it began, of those of the stages after it."""


class Report:
    """What was found, on disk after each entry; a stage goes on in the file of those before."""

    def __init__(self, path: Path, device: str, seconds: float) -> None:
        self.path, self.end = path, time.monotonic() + seconds
        self.data: dict[str, Any] = {"machine": machine.describe(device), "failures": []}
        if path.exists():
            self.data = json.loads(path.read_text())

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def add(self, section: str, entry: dict[str, Any]) -> None:
        self.data.setdefault(section, []).append(entry)
        print(section, json.dumps(entry), flush=True)
        self.write()

    def fail(self, why: str) -> None:
        self.data["failures"].append(why)
        self.write()

    def write(self) -> None:
        part = self.path.with_suffix(".part")  # a killed stage leaves a whole file
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        part.replace(self.path)

    def attempt(self, name: str, run: Callable[[], None]) -> None:
        """Run one thing unless the time is up; its failure is kept and the next one runs."""
        if self.left <= 0:
            self.add("skipped", {"what": name, "why": "out of time"})
            return
        try:
            run()
        except Exception as error:  # whatever it is, the rest must still be measured
            traceback.print_exc()
            self.fail(f"{name}: {reason(error)}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# -- kernels


def kernels(report: Report, device: str, small: bool) -> None:
    correctness(report, device, small, [torch.bfloat16])
    if device == "cuda" and library.has("triton", device):
        report.attempt("seeding", lambda: seeding(report, device))
    report.attempt("ouro", lambda: ouro(report, device))


def dtypes(report: Report, device: str, small: bool) -> None:
    correctness(report, device, small, [torch.float16, torch.float32])


def correctness(report: Report, device: str, small: bool, dtypes: list[torch.dtype]) -> None:
    rows = [(5, 33, 70)] if small else [(37, 257, 700), (300, 2048, 5632), (3, 8200, 512)]
    cases = [case for size in rows for case in row_cases(*size)]
    cases += [rotary_case(2, 3, 17, 64), *attention_cases(small)]
    for case in cases:
        for dtype in dtypes:
            for backend in every_backend(device, dtype):
                report.attempt(
                    f"{case.name} {backend} {dtype}",
                    partial(check, report, case, dtype, device, backend),
                )


def every_backend(device: str, dtype: torch.dtype) -> list[str]:
    """Those that are here, and Triton's interpreter but for bf16, whose bits it multiplies."""
    found = backends(device, dtype)
    if device == "cpu" and library.has("triton", device) and dtype != torch.bfloat16:
        found.append("triton")
    return found


def check(report: Report, case: Case, dtype: torch.dtype, device: str, backend: str) -> None:
    found = errors(case, dtype, device, backend)
    if found is None:
        return  # plain PyTorch stood in
    worst, tolerance = max(found), case.tolerance(dtype)
    good = worst <= tolerance
    report.add("correctness", {
        "case": case.name, "backend": backend, "dtype": str(dtype).removeprefix("torch."),
        "errors": [float(f"{e:.2e}") for e in found], "ok": good,
    })  # fmt: skip
    if not good:
        report.fail(f"{case.name} {backend} {dtype}: {worst:.2e} > {tolerance:.1e}")


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
    report.add("seeding", entry | {"ok": good})
    if not good:
        report.fail(f"seeding: {entry}")


def ouro(report: Report, device: str) -> None:
    """The native model: prefill, padding, packing, cache, losses and penalty."""
    from ouro_checks import checks

    for entry in checks(device):
        report.add("ouro", entry)
        if not entry["ok"]:
            report.fail(f"ouro: {entry}")


# -- timing


def timing(report: Report, device: str, small: bool) -> None:
    """What matters most comes first."""
    dtype = torch.bfloat16
    peaks = machine.peaks(device, dtype)
    report.add("peaks", {name: float(f"{peak:.4g}") for name, peak in peaks.items()})
    names = backends(device, dtype)
    cases = op.cases(device, small)
    attention = [pair for pair in cases if pair[0].name.startswith("attention")]
    rows = [pair for pair in cases if pair not in attention]

    def time_op(pair: tuple[Case, Case]) -> None:
        found = op.rows_of(*pair, names, dtype, device, 3 if small else 20, peaks)
        show(found, op.COLUMNS)
        report.add("ops", {"case": pair[0].name, "rows": found})
        for name, row in found.items():
            if row.get("wrong"):
                report.fail(f"timing: {pair[0].name}: {name}: {row['error']:.1e}")

    eager = [name for name in NAMES if not name.endswith(COMPILED)]
    turn = ["plain", "dual", "last", "double_backward"]
    blocks = [("ouro", 1, eager), ("ouro", 24, turn), ("ouro-8k", 1, eager), ("ouro-8k", 24, turn)]
    if small:
        blocks = [("ouro", 1, eager), ("ouro-8k", 2, turn)]
    for pair in attention[:1]:
        report.attempt(pair[0].name, partial(time_op, pair))
    for shape, layers, ways in blocks:
        report.attempt(
            f"{shape} x {layers}", partial(time_block, report, device, small, shape, layers, ways)
        )
    for pair in [*attention[1:], *rows]:
        report.attempt(pair[0].name, partial(time_op, pair))
    report.attempt("memory", partial(memory, report, device, small))
    for way in (name for name in NAMES if name.endswith(COMPILED)):
        if report.left < COMPILING:
            report.add("skipped", {"what": way, "why": "out of time"})
            continue
        ways = ["plain", way]
        report.attempt(
            way, partial(time_block, report, device, small, "ouro", 1, ways, graph=False)
        )


def time_block(
    report: Report,
    device: str,
    small: bool,
    name: str,
    layers: int,
    ways: list[str],
    graph: bool = True,
) -> None:
    """A block of Ouro-shaped layers, all ways; what does not fit in memory is said."""
    shape = SHAPES[name].small() if small else SHAPES[name]
    shape = replace(shape, layers=layers)
    dtype = torch.bfloat16
    mib: dict[str, float | None] = {}
    if device == "cuda":
        for way in ways:
            if not way.endswith(COMPILED) and missing(way, device) is None:
                with suppress(RuntimeError):  # why a way fails is in its row
                    mib[way] = growth.growth(way, shape, device, dtype, math.inf, None)
    block, h, u = build(shape, device, dtype)
    rows = block_level.rows_of(ways, shape, block, h, u, 2 if small else 5)
    for way, row in rows.items():
        if "failed" not in row:
            row["mib"] = mib.get(way)
    show(rows)
    report.add("blocks", {"shape": vars(shape), "rows": rows})
    for way in OURS:
        if way in rows and (rows[way].get("wrong") or "failed" in rows[way]):
            report.fail(f"timing: {name} x {layers}: {way}: {rows[way]}")
    if graph and device == "cuda":
        report.attempt(f"graph {name} x {layers}", lambda: graph_times(report, block, h, u))


def memory(report: Report, device: str, small: bool) -> None:
    """Of a layer of Ouro's against the length, to where each way runs out."""
    if device == "cuda":
        lengths = [2**k for k in range(10, 18)]
        ways = ("plain", "dual", "double_backward", "func_jvp")
        limit = growth.limit_mib(device, None)
        shape = SHAPES["ouro"].small() if small else SHAPES["ouro"]
        rows = growth.against_length(ways, lengths, shape, device, torch.bfloat16, limit, None)
        report.add("memory", rows)


def graph_times(report: Report, block: torch.nn.Module, h: Tensor, u: Tensor) -> None:
    """The captured turn: equal to the eager one, and its time."""
    parameters = list(block.parameters())
    graphed = GraphedBlock(block, h)

    def step(turn: torch.nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(fused_jsrr(turn, h, v=u), parameters)

    worst = max(
        ((a - b).float().norm() / b.float().norm()).item()
        for a, b in zip(step(graphed), step(block), strict=True)
    )
    ways = {"eager": partial(step, block), "graph": partial(step, graphed)}
    times = interleaved(ways, 5, h.device)
    entry = {f"{way}_ms": summary(seconds)["ms"] for way, seconds in times.items()}
    report.add("graphs", entry | {"layers": len(block), "tokens": h.shape[1], "difference": worst})
    if worst > 1e-3:
        report.fail(f"graph: {worst:.1e} from the eager gradients")


# -- steps


def steps(report: Report, device: str, small: bool) -> None:
    """Ouro-1.4B, and if there is time left the other ways to train it."""
    from stars_fast.bench.report import table
    from stars_fast.bench.step import COLUMNS as STEP_COLUMNS
    from stars_fast.bench.step import measure
    from stars_fast.bench.step_cases import CASES

    units = ["published-sft", "sft"]
    first = ["published-stars", "stars", "stars-last-quarter-micro"]
    second = ["jsrr", "jsrr-last", "jsrr-last-quarter-micro", "published-jsrr"]
    rest = [name for name in CASES if name not in (*units, *first, *second)]

    def some(names: list[str]) -> None:
        shape, tokens = ("tiny", 64) if small else ("ouro", 2048)
        found = measure(shape, device, "mixed", tokens, 1 if small else 3, names=names)
        print(table(found["methods"], STEP_COLUMNS), flush=True)
        report.add("steps", found)
        for name, row in found["methods"].items():
            if row.get("failed", FULL) != FULL:
                report.fail(f"steps: {name}: {row['failed']}")

    a_case = 0.0
    for group in (first, second, rest[:5], rest[5:]):
        names = [*units, *group]
        if report.left < 1.2 * a_case * len(names):
            report.add("skipped", {"what": ", ".join(group), "why": "out of time"})
            continue
        begin = time.monotonic()
        report.attempt(f"steps {group}", partial(some, names))
        a_case = (time.monotonic() - begin) / len(names)


# -- addition


EVALUATION = 5.0
"""Seconds for the accuracy at up to 100 turns, and to spare."""


def addition(report: Report, device: str, small: bool) -> None:
    """The paper's run, or as many of its steps as the time allows with its schedules as short."""
    report.attempt("addition", lambda: addition_run(report, device, small))


def addition_run(report: Report, device: str, small: bool) -> None:
    from stars_fast.training.config import load_config
    from stars_fast.training.metrics import read_metrics
    from stars_fast.training.trainer import train

    recipe, limit = ("addition-quick", 64) if small else ("addition", 1000)

    def go(folder: str, steps: int, *more: str) -> tuple[list[dict[str, Any]], float]:
        fifth = max(steps // 5, 1)
        words = (
            f"--steps {steps} --warmup_steps {fifth} --penalty.start_step {fifth} "
            f"--eval.limit {limit} --train.device {device} --train.report_to none --out {folder}"
        )
        decay = ["--decay_steps", "1"] if small else []
        begin = time.monotonic()
        train(load_config(recipe, [*words.split(), *decay, *more]))
        return read_metrics(Path(folder) / "metrics.jsonl"), time.monotonic() - begin

    with tempfile.TemporaryDirectory() as folder:
        few = 5 if small else 30
        go(f"{folder}/first", few)  # compiles, evaluates
        short, long = (
            go(f"{folder}/{n}", n * few, "--eval.turns", "")[1] for n in (1, 3)
        )  # what they share is the start
        a_step = max((long - short) / (2 * few), 1e-3)
        number = 20 if small else min(10_000, int((report.left - short - EVALUATION) / a_step))
        if number < 10:
            report.add("skipped", {"what": "addition", "why": "out of time"})
            return
        rows, seconds = go(f"{folder}/run", number)
        accuracy = json.loads((Path(folder) / "run/results.json").read_text())["accuracy"]
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    few = max(len(losses) // 5, 1)
    first, last = statistics.fmean(losses[:few]), statistics.fmean(losses[-few:])
    report.add("addition", {
        "steps": number, "of": 10_000, "seconds": round(seconds, 1), "first_loss": round(first, 4),
        "last_loss": round(last, 4), "accuracy": accuracy,
    })  # fmt: skip
    if not last < first:
        report.fail(f"addition: the loss went from {first:.3f} to {last:.3f}")


STAGES: dict[str, Callable[[Report, str, bool], None]] = {
    "kernels": kernels,
    "timing": timing,
    "steps": steps,
    "addition": addition,
    "dtypes": dtypes,
}


def run_all(options: argparse.Namespace, path: Path) -> list[str]:
    """Every stage in a process of its own; what failed."""
    saved = 0.0
    for name in options.only or [stage for stage in STAGES if stage != "dtypes"]:
        seconds = BUDGETS[name] * options.scale + saved
        words = [sys.executable, __file__, "--stage", name, "--seconds", str(seconds)]
        words += ["--device", options.device, "--json", str(path), *["--small"] * options.small]
        begin = time.monotonic()
        why = _ended(subprocess.Popen(words, start_new_session=True), seconds + GRACE)
        taken = time.monotonic() - begin
        saved = seconds - taken
        report = Report(path, options.device, 0)
        report.add("stages", {"stage": name, "seconds": round(taken, 1)})
        if why is not None:
            report.fail(f"{name}: {why}")
    return json.loads(path.read_text())["failures"]


def _ended(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Wait for a stage, and end what it left; why it did not end well, None if it did."""
    try:
        code = process.wait(seconds)
        return None if code in (0, 1) else f"ended with code {code}"
    except subprocess.TimeoutExpired:
        return f"killed after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="write the results here, entry by entry")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time budgets")
    parser.add_argument("--small", action="store_true", help="tiny sizes: prove the script")
    parser.add_argument("--only", choices=STAGES, nargs="+", help="stages to run")
    parser.add_argument("--stage", choices=STAGES, help="one stage, in this process")
    parser.add_argument("--seconds", type=float, default=300.0, help="of --stage")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --small runs the script on this machine")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.json or f"{folder}/gpu_check.json")
        if options.stage:
            torch.manual_seed(0)
            report = Report(path, options.device, options.seconds)
            before = len(report.data["failures"])
            STAGES[options.stage](report, options.device, options.small)
            report.write()
            failures = report.data["failures"][before:]
        else:
            path.unlink(missing_ok=True)
            failures = run_all(options, path)
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
