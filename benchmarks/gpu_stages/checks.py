"""Every kernel of every backend, and the native Ouro model, against fp64."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.cases import OpCase, attention_cases, backends, errors, rotary_case, row_cases
from benchmarks.gpu_stages.report import Report
from benchmarks.ouro_checks import checks as ouro_checks
from stars_fast.ops import library


def kernels(report: Report, device: str, small: bool) -> None:
    """In bf16; the model with PyTorch's attention."""
    correctness(report, device, small, [torch.bfloat16])
    if device == "cuda" and library.has("triton", device):
        report.attempt("seeding", lambda: seeding(report, device))
    report.attempt("ouro", lambda: ouro(report, device, small, ("sdpa",)))


def dtypes(report: Report, device: str, small: bool) -> None:
    """The kernels in fp16 and fp32."""
    correctness(report, device, small, [torch.float16, torch.float32])


def correctness(report: Report, device: str, small: bool, dtypes: list[torch.dtype]) -> None:
    rows = [(5, 33, 70)] if small else [(37, 257, 700), (300, 2048, 5632), (3, 8200, 512)]
    cases = [*attention_cases(small), rotary_case(2, 3, 17, 64)]
    cases += [case for size in rows for case in row_cases(*size)]
    for case in cases:
        for dtype in dtypes:
            for backend in every_backend(device, dtype):
                report.attempt(
                    f"{case.name} {backend} {dtype}",
                    partial(check_case, report, case, dtype, device, backend),
                )


def every_backend(device: str, dtype: torch.dtype) -> list[str]:
    """Those that are here, and Triton's interpreter but for bf16, whose bits it multiplies."""
    found = backends(device, dtype)
    if device == "cpu" and library.has("triton", device) and dtype != torch.bfloat16:
        found.append("triton")
    return found


def check_case(report: Report, case: OpCase, dtype: torch.dtype, device: str, backend: str) -> None:
    """A case by a backend; nothing is added where plain PyTorch stood in."""
    found = errors(case, dtype, device, backend)
    if found is None:
        return
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


def ouro(report: Report, device: str, small: bool, attentions: tuple[str, ...]) -> None:
    """The native model: prefill, padding, packing, cache, losses and penalty."""
    dtypes = (torch.float32,) if small else (torch.bfloat16, torch.float32)
    for entry in ouro_checks(device, dtypes, attentions):
        report.add("ouro", entry)
        if not entry["ok"]:
            report.fail(f"ouro: {entry}")
        if report.left <= 0:
            report.skip("the rest of ouro")
            return
