"""Ops at Ouro's shapes by backend, against PyTorch's plain ones: attention first, packed too."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import op
from benchmarks.cases import OpCase, attention_case, backends
from benchmarks.gpu_stages.report import Report
from benchmarks.machine import measured_peaks
from benchmarks.report import show

PACKED = "attention-packed"


def operations(report: Report, device: str, small: bool) -> None:
    """Without FlexAttention, which takes long to compile."""
    time_cases(report, device, small, gpu_op_cases(device, small), flex=False)


def gpu_op_cases(device: str, small: bool) -> list[tuple[OpCase, OpCase]]:
    """Pairs of a case that is timed and the same at a size that can be checked."""
    found = op.op_cases(device, small)
    attention = [pair for pair in found if pair[0].name.startswith("attention")]
    documents = [15, 1, 16] if small else [600] * 13 + [392]
    few = documents if small else [100, 1, 155]
    shape = (1, 2, 2) if small else (1, 16, 16)
    width = 16 if small else 128
    packed = tuple(
        attention_case(PACKED, *shape, sum(lengths), width, lengths) for lengths in (documents, few)
    )
    rows = [pair for pair in found if pair not in attention]
    return [*attention[:2], packed, *attention[2:], *rows]


def time_cases(
    report: Report, device: str, small: bool, pairs: list[tuple[OpCase, OpCase]], flex: bool
) -> None:
    """An entry a case."""
    dtype = torch.bfloat16
    peaks = measured_peaks(device, dtype)
    report.add("peaks", {name: float(f"{peak:.4g}") for name, peak in peaks.items()})
    names = backends(device, dtype)
    for pair in pairs:
        report.attempt(
            pair[0].name, partial(time_case, report, pair, names, device, small, peaks, flex)
        )


def time_case(
    report: Report,
    pair: tuple[OpCase, OpCase],
    names: list[str],
    device: str,
    small: bool,
    peaks: dict[str, float],
    flex: bool,
) -> None:
    repeats = 2 if small else 20
    found = op.op_rows(*pair, names, torch.bfloat16, device, repeats, peaks, flex)
    show(found, op.OP_COLUMNS)
    if pair[0].name == PACKED:  # the arithmetic is counted as that of one document
        found = {
            name: {key: x for key, x in row.items() if "gemm" not in key and "gflop" not in key}
            for name, row in found.items()
        }
    report.add("ops", {"case": pair[0].name, "rows": found})
    for name, row in found.items():
        if row.get("wrong"):
            report.fail(f"{pair[0].name}: {name}: {row['error']:.1e}")
        elif name in names and "failed" in row:
            report.fail(f"{pair[0].name}: {name}: {row['failed']}")
