"""Whole training steps of Ouro-1.4B with random weights, the trainer's own."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch

from benchmarks.gpu_stages.report import Report
from benchmarks.machine import usual_precision
from benchmarks.report import FULL
from benchmarks.step_cases import STEP_CASES
from benchmarks.step_runs import Bench, Steps
from benchmarks.timing import interleaved
from stars_fast.training.graphs.recorder import stand_in
from stars_fast.training.run.metrics import peak_flops

OUR_CASES = ("sft", "stars-last-quarter-micro", "stars", "jsrr")
GRAPHED = {
    2048: ("sft", "stars-last-quarter-micro", "stars"),
    4096: ("sft", "stars-last-quarter-micro"),
}
"""Timed with CUDA graphs too, by tokens; of others the one case in the middle."""


def steps(report: Report, device: str, small: bool) -> None:
    """Ours, by tokens of a micro-batch."""
    for tokens in (64,) if small else (2048, 4096, 8192):
        name = f"steps of {tokens} tokens"
        report.attempt(name, partial(time_steps, report, device, small, tokens, OUR_CASES))


def time_steps(report: Report, device: str, small: bool, tokens: int, names: Sequence[str]) -> None:
    """An entry a case, as soon as its steps are done; model and optimiser are made once."""
    bench = Bench("tiny" if small else "ouro", device, usual_precision(device), tokens, 1, None)
    graphed = [name for name in names if name in GRAPHED.get(tokens, OUR_CASES[1:2])]
    # A graph that breaks the device takes what follows it in this process.
    for graphs, chosen in ((False, names), (True, graphed)):
        for name in chosen:
            what = f"{name}, {tokens} tokens" + ", graphs" * graphs
            report.attempt(what, partial(time_step, report, bench, name, graphs))


def time_step(report: Report, bench: Bench, name: str, graphs: bool = False) -> None:
    """One step to warm up, which captures graphs, and one that is timed."""
    with stand_in() if bench.device.type == "cpu" else nullcontext():
        steps = Steps(bench, STEP_CASES[name], graphs)
        steps.prepare()
    if steps.failed is None:
        seconds = interleaved({name: steps}, 1, bench.device)[name]
    if steps.failed is None:
        row = steps.row(seconds, peak_flops(bench.device, bench.precision))
    else:
        row = {"failed": steps.failed}
        if steps.failed != FULL:
            report.fail(f"{name}, {bench.tokens} tokens, graphs {graphs}: {steps.failed}")
    report.add("steps", {"case": name, "tokens": bench.tokens, "graphs": graphs, **row})
    del steps
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
