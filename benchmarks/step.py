"""Whole training steps by method, the published way against ours, all taking turns in one run.

A step is everything that a trainer does in one: its documents forward and backward, the norm of the
gradients, clipping, AdamW. Weights and chats are random; every case gets the same documents, the
same depths and the same model. Ours is the trainer's own step, on packed rows; the published way
(`published.py`) takes the documents one by one. What is left of a difference is how the two work.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.agreement import DisagreementError, check_agreement
from benchmarks.machine import usual_precision
from benchmarks.report import FULL, Row, reason, show, write
from benchmarks.step_cases import STEP_CASES
from benchmarks.step_runs import Bench, Steps
from benchmarks.timing import in_its_own_process, interleaved, process_growth, ratio
from benchmarks.workload import MICROS, MODEL_SIZES
from stars_fast.base.machine import describe
from stars_fast.base.optional import need
from stars_fast.training.run.metrics import peak_flops
from stars_fast.training.step.precision import PRECISIONS

STEP_COLUMNS = {
    "seconds": ("s", ".4f"),
    "spread": ("spread", ".0%"),
    "turns": ("turns", ".2f"),
    "seconds_at_mean": ("s at mean", ".4f"),
    "over_published": ("/ published", ".3f"),
    "floor_published": ("by count", ".3f"),
    "over_own": ("/ own sft", ".3f"),
    "floor_own": ("by count", ".3f"),
    "paper": ("paper", ".4f"),
    "tokens_per_second": ("tokens/s", ".0f"),
    "mfu": ("MFU", ".1%"),
    "mib": ("MiB", ".0f"),
}


def measure_steps(
    shape: str,
    device: str,
    precision: str,
    tokens: int | None = None,
    repeats: int = 10,
    layers: int | None = None,
    names: Sequence[str] = tuple(STEP_CASES),
    memory: bool = False,
) -> dict[str, Any]:
    """Times of `repeats` steps of each of the cases `names`, with what they are over SFT.

    `tokens` is the most of a packed row, and of a document; the shape's by default. With `memory`
    the memory of a step is measured on a CPU too, in a process for each case.

    A row has
        seconds, spread: of a step, the median and the distance of the quartiles over it
        turns: mean of those that were run
        seconds_at_mean: each time multiplied by the arithmetic of its step at the mean of the depth
            law over that at the depths that were run; the median
        over_published, over_own: these times over those of published-sft and of sft in the same
            round, on the same documents; the median
        floor_published, floor_own: the same of the arithmetic, by `floors.py`, on the documents,
            depths and supervised tokens that were run; what ours recomputes to save memory is left
            out, what the published way does is not. A ratio of counts, not a bound: a measured
            ratio can be below it
        gflop: that arithmetic, of a step
        tokens_per_second: of real tokens
        mfu: the arithmetic that the method needs, without what is computed again, over the device's
            peak; only where that is known
        mib: what a step adds at its peak to weights, gradients and averages, or why it is not known
        paper: the paper's time over SFT

    or `failed`, the reason why it has none.

    Raises:
        DisagreementError: the published way does not compute what ours does.
    """
    bench = Bench(shape, device, precision, tokens, repeats, layers)
    errors = check_agreement(bench.fields, bench.device, precision)
    runs = {name: Steps(bench, STEP_CASES[name]) for name in names}
    for steps in runs.values():
        steps.prepare()
    alive = {name: steps for name, steps in runs.items() if steps.failed is None}
    times = interleaved(alive, repeats, device) if alive else {}
    peak = peak_flops(bench.device, precision)
    rows: dict[str, Row] = {}
    for name, steps in runs.items():
        if steps.failed is not None:
            rows[name] = {"failed": steps.failed}
        else:
            rows[name] = steps.row(times[name], peak)
    for name in alive:
        if memory and bench.device.type == "cpu" and "failed" not in rows[name]:
            try:
                grown = in_its_own_process(
                    "benchmarks.step:step_growth",
                    shape=shape,
                    name=name,
                    precision=precision,
                    tokens=tokens,
                    layers=layers,
                    threads=torch.get_num_threads(),
                )
            except RuntimeError as error:
                rows[name]["mib"] = reason(error)
            else:
                rows[name]["mib"] = round(grown, 1)
    _add_ratios(rows, runs)
    return {
        "shape": shape,
        "layers": bench.sizes.layers,
        "tokens_a_micro_batch": bench.tokens,
        "micro_batches": MICROS,
        "precision": precision,
        "repeats": repeats,
        "depths": bench.depths[1:],
        "differences": {what: float(f"{error:.1e}") for what, error in errors.items()},
        "methods": rows,
    }


def _add_ratios(rows: dict[str, Row], runs: Mapping[str, Steps]) -> None:
    for unit, key in (("published-sft", "published"), ("sft", "own")):
        if "failed" in rows.get(unit, {"failed": "not asked for"}):
            continue
        for name, row in rows.items():
            if "failed" not in row:
                row[f"over_{key}"] = round(ratio(runs[name].at_mean, runs[unit].at_mean), 4)
                row[f"floor_{key}"] = round(row["gflop"] / rows[unit]["gflop"], 4)


def step_growth(
    shape: str, name: str, precision: str, tokens: int | None, layers: int | None, threads: int
) -> float:
    """MiB that a step of a case adds to this process, which has run none of this size yet."""
    torch.set_num_threads(threads)
    # A step of nearly nothing leaves behind what is loaded once.
    Steps(Bench("tiny", "cpu", precision, 32, 1, 1), STEP_CASES[name]).step(0)
    bench = Bench(shape, "cpu", precision, tokens, 1, layers)
    steps = Steps(bench, STEP_CASES[name])
    return process_growth(lambda: steps.step(0))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this level; device, threads, repeats, json and small are common to all levels."""
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=MODEL_SIZES,
        metavar="NAME",
        help="of tiny, small, ouro (default: tiny and small on the CPU, ouro on CUDA)",
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="(default: float32 on the CPU, mixed on CUDA)"
    )
    parser.add_argument("--tokens", type=int, help="of a packed row and of a document, at most")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=STEP_CASES,
        metavar="CASE",
        help="of " + ", ".join(STEP_CASES) + " (default: all)",
    )
    parser.add_argument(
        "--memory", action="store_true", help="memory on the CPU too, in a process a case"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the JSON; 1 if the published way is not what ours is, or a case of
    ours fails for anything but memory.

    Raises:
        ConfigError: without transformers.
    """
    need("transformers", "the models of bench step")
    device = options.device
    shapes = options.shape or (["ouro"] if device == "cuda" else ["tiny", "small"])
    tokens = options.tokens
    if options.small:
        shapes, tokens = options.shape or ["tiny"], tokens or 64
    result: dict[str, Any] = {"level": "step", "machine": describe(device), "shapes": []}
    for shape in shapes:
        try:
            found = measure_steps(
                shape,
                device,
                options.precision or usual_precision(device),
                tokens,
                options.repeats,
                options.layers,
                options.cases or tuple(STEP_CASES),
                options.memory,
            )
        except DisagreementError as error:
            print(f"{shape}: {error}")
            return 1
        result["shapes"].append(found)
        print(f"{shape}, {found['layers']} layers, {found['precision']}")
        show(found["methods"], STEP_COLUMNS)
        write(options.json, result)
    ours = [
        row
        for found in result["shapes"]
        for name, row in found["methods"].items()
        if not STEP_CASES[name].published
    ]
    return 1 if any(row.get("failed", FULL) != FULL for row in ours) else 0
