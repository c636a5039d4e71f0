"""Is everything right on this GPU, how fast is it, and does it train? One JSON file.

    python benchmarks/gpu_check.py [--json FILE] [--only STAGE ...] [--seconds 480]
    python benchmarks/gpu_check.py --device cpu --small           # proves the script
    compute-sanitizer python benchmarks/gpu_check.py --stage kernels --small

Stages (`gpu_stages`), in the order of what they are worth, each in a process of its own:

    smoke      does everything run: a penalty, a step, a graph, each kernel in each dtype, tiny
    kernels    every kernel of every backend against fp64, in bf16; the native Ouro model
    turns      a turn of Ouro-1.4B: plain and dual, eager and graph, causal and packed, 2k to 8k
    steps      training steps of Ouro-1.4B, ours, by 2k, 4k and 8k tokens
    norms      norms by Triton and by CUDA C++, which is built beside the stages before
    ops        attention, packed too, and row ops, forward and backward
    designs    the attention's backward by each of its designs, against the split kernels
    tiles      the tile tuner: causal, packed, grouped heads
    addition   the paper's addition run, as many of its 10,000 steps as fit; accuracy by turns
    published  blocks and steps the published way, FlexAttention, compiled ways, memory sweeps
    dtypes     the kernels in fp16 and fp32 (only if asked for)

All share one deadline. Each stage has its part of it, and what the stages before did not use; it
skips what it has no time for and is killed soon after. The file, $OUT/gpu.json if OUT is set, is
written after each entry. Exits with 0 if all stages ran and all checks passed, else with 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

CLONE = Path(__file__).resolve().parents[1]
# This clone, whatever is installed; also for the processes that are started from here.
sys.path.insert(0, str(CLONE))

SECONDS = 480.0
GRACE = 5.0
"""Seconds that a stage gets to end what it began, of those of the stages after it."""


def schedule(shares: dict[str, float], seconds: float) -> dict[str, float]:
    """When each stage must have ended, counted from the start: its part and those before it."""
    ends, total = {}, 0.0
    for name, share in shares.items():
        total += share
        ends[name] = seconds * total / sum(shares.values())
    return ends


def stage_here(options: argparse.Namespace, path: Path, name: str, seconds: float) -> int:
    """One stage in this process: 1 if something in it failed."""
    import torch

    from benchmarks.gpu_stages import STAGES
    from benchmarks.gpu_stages.report import Report

    gc.freeze()  # what is imported stays, and each attempt would search it for what is free
    torch.manual_seed(0)
    report = Report(path, name, seconds, strict=name in ("smoke", "kernels"))
    before = len(report.data["failures"])
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device; --device cpu --small runs without one")
        STAGES[name].run(report, options.device, options.small)
    except Exception as error:  # the other stages are worth their figures
        traceback.print_exc()
        report.fail(f"{type(error).__name__}: {error}")
    report.write()
    return 1 if len(report.data["failures"]) > before else 0


def run_all(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Every stage within the deadline; the whole result."""
    from benchmarks.gpu_stages import EXTRA, STAGES
    from benchmarks.gpu_stages.norms import build_extension
    from benchmarks.gpu_stages.report import Report

    begin = time.monotonic()
    names = options.only or [name for name in STAGES if name not in EXTRA]
    ends = schedule({name: STAGES[name].share for name in names}, options.seconds)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        building = None
        if any(STAGES[name].built for name in names):
            building = build_extension(copy, options.device)
        try:
            for name in names:
                started = time.monotonic()
                seconds = max(begin + ends[name] - started, 0.0)
                why = None if seconds else "out of time"
                folder = CLONE
                if why is None and building is not None and STAGES[name].built:
                    why = _built(building, copy, seconds)
                    folder = copy if why is None else folder
                    seconds = max(begin + ends[name] - time.monotonic(), 1.0)
                    if why is not None:
                        Report(path, name, 0).fail(f"build: {why}")
                        why = None  # what is here without it is timed all the same
                if why is None:
                    why = _forked(options, path, name, seconds, folder)
                report = Report(path, name, 0)
                taken = round(time.monotonic() - started, 1)
                report.add("stages", {"seconds": taken, "ran": why is None})
                if why is not None:
                    report.fail(why)
        finally:
            if building is not None:
                _end(building.pid)
                building.wait()
    return json.loads(path.read_text())


def _built(building: subprocess.Popen[bytes], copy: Path, seconds: float) -> str | None:
    """Wait for the extension for half of the stage's time; why it is not there, None if it is."""
    try:
        if building.wait(seconds / 2) == 0:
            return None
        return (copy / "build.log").read_text(errors="replace")[-1500:]
    except subprocess.TimeoutExpired:
        return f"not done in time: {(copy / 'build.log').read_text(errors='replace')[-300:]}"


def _forked(
    options: argparse.Namespace, path: Path, name: str, seconds: float, folder: Path
) -> str | None:
    """A stage in a process of its own; why it did not end well, None if it did.

    Forked, not started anew: what all stages import is imported once, and no GPU has been touched.
    A stage with a package of its own, the copy with the built extension, is started anew.
    """

    def child() -> None:
        os.setsid()
        if folder == CLONE:
            code = stage_here(options, path, name, seconds)
        else:
            words = [sys.executable, str(folder / "benchmarks/gpu_check.py"), "--stage", name]
            words += ["--device", options.device, "--json", str(path), "--seconds", str(seconds)]
            code = subprocess.run([*words, *["--small"] * options.small], check=False).returncode
        sys.stdout.flush()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        process.join(seconds + GRACE)
        ended = process.exitcode
    finally:  # also where this process is told to stop
        _end(process.pid)
        process.kill()  # it may not have its group yet
        process.join()
    if ended is None:
        return f"killed after {seconds + GRACE:.0f} s"
    return None if ended in (0, 1) else f"ended with code {ended}"


def _end(group: int | None) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        if group is not None:
            os.killpg(group, signal.SIGKILL)


def stage_lines(data: dict[str, Any]) -> str:
    """A line a stage: seconds, entries, what failed, what was skipped."""
    lines = [f"{'stage':10} {'seconds':>8} {'entries':>8} {'failed':>7} {'skipped':>8}"]
    other = ("stages", "failures", "skipped")
    entries = [each for key, found in data.items() if key not in other for each in found]
    for each in data["stages"]:
        counts = [
            sum(entry["stage"] == each["stage"] for entry in found)
            for found in (entries, data["failures"], data["skipped"])
        ]
        lines.append(
            f"{each['stage']:10} {each['seconds']:8.1f} {counts[0]:8} {counts[1]:7} {counts[2]:8}"
        )
    lines += [f"FAILED {each['stage']}: {each['why']}" for each in data["failures"]]
    lines += [f"skipped {each['stage']}: {each['what']}" for each in data["skipped"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="the results (default: $OUT/gpu.json if OUT is set)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all stages together")
    parser.add_argument("--small", action="store_true", help="tiny sizes: prove the script")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="stages to run")
    parser.add_argument("--stage", help="one stage, in this process")
    options = parser.parse_args()
    if not options.seconds > 0:
        parser.error(f"--seconds: expected more than 0, got {options.seconds}")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CLONE), os.environ.get("PYTHONPATH", "")])
    if options.device == "cpu" and importlib.util.find_spec("triton"):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from benchmarks.gpu_stages import STAGES

    for name in [*(options.only or []), *([options.stage] if options.stage else [])]:
        if name not in STAGES:
            parser.error(f"--only: expected stages of {', '.join(STAGES)}, got {name}")
    with tempfile.TemporaryDirectory() as folder:
        out = os.environ.get("OUT")
        path = Path(options.json or (f"{out}/gpu.json" if out else f"{folder}/gpu.json"))
        if options.stage:
            return stage_here(options, path, options.stage, options.seconds)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of `_end`
        data = run_all(options, path)
    print(stage_lines(data))
    return 1 if data["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
