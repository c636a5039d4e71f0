"""Ours beside others: the ways to the penalty at block level, FlexAttention, the published way's
steps, compiled ways, memory against length."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from benchmarks import block as block_level
from benchmarks import growth
from benchmarks.blocks import SHAPES, build_block
from benchmarks.gpu_stages.checks import ouro
from benchmarks.gpu_stages.operations import gpu_op_cases as op_cases
from benchmarks.gpu_stages.operations import time_cases
from benchmarks.gpu_stages.report import Report
from benchmarks.gpu_stages.steps import time_steps as step_cases
from benchmarks.report import show
from benchmarks.ways import COMPILED, NAMES, OURS, missing

COMPILING = 50.0
"""Seconds that a way under torch.compile may take: it is tried in a process of its own first."""
PUBLISHED = ("published-sft", "published-stars")


def published(report: Report, device: str, small: bool) -> None:
    """Blocks, steps, then ops; the longest comes last."""
    eager = [name for name in NAMES if not name.endswith(COMPILED)]
    turn = ["plain", "dual", "last", "double_backward"]
    sizes = [("ouro", 24, turn), ("ouro-8k", 24, turn), ("ouro", 1, eager)]
    if small:
        sizes = [("ouro", 1, ["plain", "dual"])]
    for shape, layers, ways in sizes:
        report.attempt(
            f"{shape} x {layers}", partial(time_block, report, device, small, shape, layers, ways)
        )
    tokens, names = (64, PUBLISHED[:1]) if small else (2048, PUBLISHED)
    report.attempt(
        "published steps",
        partial(step_cases, report, device, small, tokens, names),
        needs=0.0 if small else 25.0,
    )
    if device == "cuda":
        pairs = [pair for pair in op_cases(device, small) if "attention-B" in pair[0].name]
        time_cases(report, device, small, pairs[:2], flex=True)
        report.attempt("ouro", partial(ouro, report, device, small, ("eager", "flex_attention")))
        for way in (name for name in NAMES if name.endswith(COMPILED)):
            ways = ["plain", way]
            run = partial(time_block, report, device, small, "ouro", 1, ways)
            report.attempt(way, run, needs=COMPILING)
        report.attempt("memory", partial(memory, report, device, small))


def time_block(
    report: Report, device: str, small: bool, name: str, layers: int, ways: list[str]
) -> None:
    """A block of Ouro-shaped layers, all ways; what does not fit in memory is said. `plain` is what
    a user would write: without our fused rotary, gates and sums of residual and norm."""
    shape = SHAPES[name].small() if small else SHAPES[name]
    shape = replace(shape, layers=layers)
    dtype = torch.bfloat16
    mib: dict[str, float | None] = {}
    if device == "cuda":
        for way in ways:
            if not way.endswith(COMPILED) and missing(way, device) is None:
                with suppress(RuntimeError):  # why a way fails is in its row
                    mib[way] = growth.way_growth(way, shape, device, dtype, math.inf, None)
    block, h, u = build_block(shape, device, dtype)
    rows = block_level.way_rows(ways, shape, block, h, u, 1 if small else 3)
    for way, row in rows.items():
        if "failed" not in row:
            row["mib"] = mib.get(way)
    show(rows)
    report.add("blocks", {"shape": vars(shape), "rows": rows})
    for way in OURS:
        if way in rows and (rows[way].get("wrong") or "failed" in rows[way]):
            report.fail(f"{name} x {layers}: {way}: {rows[way]}")


def memory(report: Report, device: str, small: bool) -> None:
    """Memory of a layer of Ouro's against the length, to where each way runs out."""
    lengths = [2**k for k in range(10, 18)]
    limit = growth.limit_mib(device, None)
    shape = SHAPES["ouro"].small() if small else SHAPES["ouro"]
    ways = ("plain", "dual", "double_backward", "func_jvp")
    rows = growth.against_length(ways, lengths, shape, device, torch.bfloat16, limit, None)
    report.add("memory", {"rows": rows})
