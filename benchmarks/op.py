"""`python -m benchmarks op`: every op, forward and backward, its dual against PyTorch's plain one.

Each backend's output, tangent and cotangents are compared with fp64 first (attention at most at 512
tokens); then all that compute a case take turns, on CUDA by the device's clock with a cold cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import (
    OpCase,
    attention_case,
    backends,
    errors,
    rotary_case,
    row_cases,
)
from benchmarks.machine import measured_peaks
from benchmarks.report import Row, reason, show, write
from benchmarks.timing import Run, device_clock, interleaved, ratio, summary
from stars_fast import ops
from stars_fast.base import machine
from stars_fast.base.errors import ConfigError

OPS = ("rms_norm", "layer_norm", "sandwich", "swiglu", "gelu", "softmax", "rotary", "attention")
FLEX = "FlexAttention"
"""A plain flash attention in the language of ours, Triton."""
DIRECTIONS = ("forward", "backward")
OP_COLUMNS = {
    "forward_us": ("fwd, us", ".1f"),
    "forward_spread": ("spread", ".1%"),
    "forward_ratio": ("ratio", ".2f"),
    "forward_over_flex": ("over flex", ".2f"),
    "forward_of_copy": ("of copy", ".0%"),
    "forward_of_gemm": ("of GEMM", ".0%"),
    "backward_us": ("bwd, us", ".1f"),
    "backward_spread": ("spread", ".1%"),
    "backward_ratio": ("ratio", ".2f"),
    "backward_over_flex": ("over flex", ".2f"),
    "backward_of_copy": ("of copy", ".0%"),
    "backward_of_gemm": ("of GEMM", ".0%"),
    "error": ("error", ".1e"),
}
_CHECKED_LENGTH = 512
"""Longest attention that is checked: the reference holds its matrices in fp64."""

Contender = tuple[Row, dict[str, Run]]
"""Figures known before anything is timed, and the runs by direction."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this level alone."""
    parser.add_argument(
        "--ops", nargs="+", choices=OPS, metavar="OP", help=f"of {', '.join(OPS)} (default: all)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure; 1 if an error is above its tolerance or one of our backends fails.

    Raises:
        ConfigError: the backend is not here.
    """
    device, dtype = options.device, getattr(torch, options.dtype)
    names = [b for b in backends(device, dtype) if options.backend in (None, b)]
    if not names:
        raise ConfigError(
            f"--backend: expected one for {device} and {options.dtype}, got {options.backend}"
        )
    peaks = measured_peaks(device, dtype)
    result: dict[str, Any] = {
        "machine": machine.describe(device),
        "dtype": options.dtype,
        "peaks": peaks,
        "rows": {},
    }
    bad = []
    for timed, checked in op_cases(device, options.small):
        if options.ops and timed.name.partition("-")[0] not in options.ops:
            continue
        rows = op_rows(timed, checked, names, dtype, device, options.repeats, peaks)
        print(f"\n{timed.name} {[list(t.shape) for t in timed.stacks]}")
        show(rows, OP_COLUMNS)
        result["rows"][timed.name] = {
            "shapes": [list(t.shape) for t in timed.stacks],
            "checked": [list(t.shape) for t in checked.stacks],
            "rows": rows,
        }
        write(options.json, result)
        ours = ((name, rows[name]) for name in names if name in rows)
        bad += [f"{timed.name} {n}" for n, row in ours if row.get("wrong") or "failed" in row]
    for name in bad:
        print(f"FAILED {name}")
    return 1 if bad else 0


def op_cases(device: str, small: bool) -> list[tuple[OpCase, OpCase]]:
    """Pairs of a case that is timed and the same at a size that can be checked."""
    if small:
        rows, width, hidden = 33, 64, 176
        shapes = [(1, 2, 2, 48, 16)]
    elif device == "cuda":
        rows, width, hidden = 8192, 2048, 5632
        shapes = [(1, 16, 16, 2048, 128), (1, 16, 16, 8192, 128), (4, 16, 16, 2048, 64)]
        shapes += [(1, 16, 4, 2048, 128)]
    else:
        rows, width, hidden = 1024, 512, 1408
        shapes = [(2, 8, 8, 512, 64), (1, 8, 8, 2048, 64), (64, 8, 8, 16, 64), (2, 8, 2, 512, 64)]
    found = [(c, c) for c in row_cases(rows, width, hidden)]
    rotary = rotary_case(1, max(width // 64, 1), rows, 64)
    found.append((rotary, rotary))
    for batch, heads, kv_heads, length, d in shapes:
        name = f"attention-B{batch}-H{heads}/{kv_heads}-S{length}-D{d}"
        timed = attention_case(name, batch, heads, kv_heads, length, d)
        fewer = min(length, _CHECKED_LENGTH)
        checked = timed
        if fewer < length:
            checked = attention_case(name, batch, heads, kv_heads, fewer, d)
        found.append((timed, checked))
    return found


def op_rows(
    timed: OpCase,
    checked: OpCase,
    names: list[str],
    dtype: torch.dtype,
    device: str,
    repeats: int,
    peaks: Mapping[str, float],
    flex: bool = True,
) -> dict[str, Row]:
    """A row for PyTorch's plain op, each backend that answers, and on CUDA FlexAttention, which
    takes long to compile, unless `flex` is False."""
    stacks = [t.to(device, dtype) for t in timed.stacks]
    primals = [t[0].clone() for t in stacks]
    plains = [t.to(device, dtype) for t in timed.plains]

    def ours(backend: str) -> Contender | None:
        found = errors(checked, dtype, device, backend)
        if found is None:
            return None
        row: Row = {"error": max(found), "errors": [float(f"{e:.2e}") for e in found]}
        if not max(found) <= checked.tolerance(dtype):
            row["wrong"] = True
        return row, both_ways(timed.op, [*stacks, *plains], backend)

    def compiled_flex() -> Contender:
        return {}, both_ways(flex_attention(primals[0].shape[-2]), primals)

    contenders: dict[str, Callable[[], Contender | None]] = {
        "plain": lambda: ({}, both_ways(timed.torch_op, [*primals, *plains]))
    }
    alike = len(primals) > 1 and primals[0].shape == primals[1].shape
    if flex and "attention" in timed.name and device == "cuda" and alike:
        contenders[FLEX] = compiled_flex
    contenders |= {name: partial(ours, name) for name in names}

    rows: dict[str, Row] = {}
    runs: dict[str, Run] = {}
    for name, contender in contenders.items():
        try:
            found = contender()
        except Exception as error:  # one that does not run takes no other with it
            rows[name] = {"failed": reason(error)}
            continue
        if found is not None:
            rows[name] = found[0]
            runs |= {f"{name} {way}": run for way, run in found[1].items()}
    times = interleaved(runs, repeats, device, device_clock(device))
    for name, row in rows.items():
        if "failed" not in row:
            for way in DIRECTIONS:
                row |= _figures(timed, name, way, times, dtype, peaks, name in names)
    return rows


def _figures(
    case: OpCase,
    name: str,
    way: str,
    times: Mapping[str, list[float]],
    dtype: torch.dtype,
    peaks: Mapping[str, float],
    dual: bool,
) -> Row:
    """Time, ratio to plain, and the share of what the machine can do, of one direction."""
    seconds, unit = times[f"{name} {way}"], times.get(f"plain {way}")
    mine = summary(seconds)
    row = {"us": round(1e3 * mine["ms"], 2), "spread": mine["spread"]}
    if unit is not None:
        row["ratio"] = round(ratio(seconds, unit), 3)
    flex = times.get(f"{FLEX} {way}")
    if flex is not None:
        row["over_flex"] = round(ratio(seconds, flex), 3)
    if "attention" in case.name:
        work = attention_flops(case, way) * (3 if dual else 1)
        share, unit_name, peak = "of_gemm", "gflop", peaks["gemm_flops"]
    else:
        work = case.moved[DIRECTIONS.index(way)] * dtype.itemsize // (1 if dual else 2)
        share, unit_name, peak = "of_copy", "gbyte", peaks["copy_bytes"]
    row[unit_name] = round(work / 1e9, 5)
    row[share] = round(work / (mine["ms"] / 1e3) / peak, 3)
    return {f"{way}_{key}": value for key, value in row.items()}


def attention_flops(case: OpCase, way: str) -> int:
    """FLOPs of plain causal attention: 2 products forward, 5 backward, each of half the square.
    Its dual has three times as many."""
    _, batch, heads, length, width = case.stacks[0].shape
    return {"forward": 2, "backward": 5}[way] * batch * heads * length**2 * width


def both_ways(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], backend: str | None = None
) -> dict[str, Run]:
    """Runs of forward (without a graph) and of backward, for all inputs, by a backend."""
    leaves = [t.detach().requires_grad_() for t in inputs]

    def forward() -> Tensor:
        with torch.no_grad(), ops.backend(backend):
            return function(*leaves)

    with ops.backend(backend):
        out = function(*leaves)
    bar = torch.randn_like(out)

    def backward() -> tuple[Tensor, ...]:
        with ops.backend(backend):
            return torch.autograd.grad(out, leaves, bar, retain_graph=True)

    return {"forward": forward, "backward": backward}


def flex_attention(length: int) -> Callable[..., Tensor]:
    """PyTorch's compiled causal flash attention in Triton, at this length."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)
