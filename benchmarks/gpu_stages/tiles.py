"""Other tiles for the attention kernels, causal, packed and with grouped heads."""

from __future__ import annotations

from functools import partial

from benchmarks import tune_attention
from benchmarks.gpu_stages.report import Report

PACKINGS = {"causal": [], "packed": ["--documents", "600"], "grouped": ["--kv-heads", "4"]}


def tiles(report: Report, device: str, small: bool) -> None:
    """By shape; an entry a kernel, as soon as it has been timed."""
    for index, (name, words) in enumerate(PACKINGS.items()):
        seconds = report.left / (len(PACKINGS) - index)
        report.attempt(name, partial(tune_packing, report, device, small, name, words, seconds))


def tune_packing(
    report: Report, device: str, small: bool, name: str, words: list[str], seconds: float
) -> None:
    # Half of the time to compile the candidates, half to time those that are ready.
    words = [*words, "--device", device, "--seconds", str(seconds / 2), "--until", str(seconds)]
    words += ["--small", "--width", "64", "--length", "20"] if small else []
    tune_attention.tune(
        tune_attention.parser().parse_args(words),
        lambda kernel, row: report.add("tiles", {"shape": name, "kernel": kernel, **row}),
    )
