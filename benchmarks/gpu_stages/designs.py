"""Designs of the attention's backward: each against the split kernels, and the time of each.

The deterministic ones first, and what has never run on a GPU last: a kernel that hangs or breaks
the device takes nothing else with it but the rest of this stage.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_stages.report import Report
from benchmarks.timing import device_clock, interleaved, summary
from stars_fast.ops.spans import Spans

# Relative, of two results that are each within 8e-3 of the truth in bf16, 1.5e-3 in fp16.
TOLERANCES = {torch.bfloat16: 1.6e-2, torch.float16: 3e-3}


class Shape(NamedTuple):
    """Heads, kv heads, and the tokens of each packed document, or of the one sequence."""

    heads: int
    kv_heads: int
    documents: tuple[int, ...]


SHAPES = {
    "causal-2048": Shape(16, 16, (2048,)),
    "causal-8192": Shape(16, 16, (8192,)),
    "packed-8192": Shape(16, 16, (600,) * 13 + (392,)),
    "grouped-4096": Shape(16, 4, (4096,)),
    "odd-1001": Shape(4, 2, (100, 1, 0, 900)),
}
SMALL = {"causal-40": Shape(2, 1, (40,)), "packed-33": Shape(2, 2, (16, 0, 1, 16))}


def designs(report: Report, device: str, small: bool) -> None:
    """An entry a design and shape."""
    from stars_fast.ops.triton.attention_backward import DESIGNS

    last = "warpgroups"
    order = sorted(DESIGNS, key=lambda name: (name == last, not DESIGNS[name].deterministic))
    for name in order:
        for case, shape in (SMALL if small else SHAPES).items():
            run = partial(check_and_time, report, name, case, shape, device, small)
            report.attempt(f"{name} {case}", run)


def check_and_time(
    report: Report, name: str, case: str, shape: Shape, device: str, small: bool
) -> None:
    """A design and the split kernels on the same inputs, in turns."""
    from stars_fast.ops.triton.attention_backward import DESIGNS, backward_by

    arguments = backward_arguments(shape, device, 16 if small else 128)
    q = arguments[1]
    if not DESIGNS[name].takes(q):
        return
    expected = backward_by("split", *arguments)
    found = backward_by(name, *arguments)
    errors = [
        ((x[half].double() - y[half]).norm() / y[half].double().norm()).item()
        for x, y in zip(found, expected, strict=True)
        for half in range(2)
    ]
    ways = {each: partial(backward_by, each, *arguments) for each in dict.fromkeys(("split", name))}
    times = interleaved(ways, 1 if small else 20, device, device_clock(device))
    good = max(errors) <= TOLERANCES[q.dtype]  # False for NaN
    report.add("designs", {
        "design": name, "case": case, "errors": [float(f"{e:.2e}") for e in errors], "ok": good,
        **{each: summary(seconds) for each, seconds in times.items()},
    })  # fmt: skip
    if not good:
        report.fail(f"{name} {case}: {errors}")


def backward_arguments(shape: Shape, device: str, width: int) -> tuple[Any, ...]:
    """The arguments of `backward_by` after the name, from the forward in bf16; in fp16 in Triton's
    interpreter, which multiplies the bits of bf16."""
    from stars_fast.ops.triton.attention import attention

    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    length = sum(shape.documents)
    q, k, v, grad = (
        torch.randn(2, 1, heads, length, width, device=device).to(dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    )
    spans: tuple[Any, Any] = (None, None)
    causal = len(shape.documents) == 1
    if not causal:
        ends = torch.tensor((0, *shape.documents), device=device).cumsum(0)
        found = Spans.of_documents(ends, ends, length, length, True)
        spans = found.queries, found.keys
    setting = *spans, causal, width**-0.5
    out, lse, mu = attention(q, k, v, *setting)
    return grad, q, k, v, out, lse, mu, *setting
