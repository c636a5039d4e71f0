"""Does everything run? One small call of each thing, the newest and most used first."""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial

import torch

from benchmarks.blocks import SHAPES, build_block
from benchmarks.cases import attention_cases, rotary_case, row_cases
from benchmarks.gpu_stages.checks import check_case, every_backend
from benchmarks.gpu_stages.report import Report
from benchmarks.gpu_stages.turns import graph_difference
from benchmarks.machine import usual_precision
from benchmarks.step_cases import STEP_CASES
from benchmarks.step_runs import Bench, Steps
from stars_fast import fused_jsrr, ops
from stars_fast.base import machine
from stars_fast.models.families.ouro import OuroLoop
from stars_fast.training.graphs.graphs import CLOSE
from stars_fast.training.graphs.recorder import stand_in
from stars_fast.training.graphs.set_up import set_up_graphs
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.precision import autocast
from stars_fast.training.step.train_step import StepLoss, StepPlan, run_between

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def smoke(report: Report, device: str, small: bool) -> None:
    """A penalty, a step, a graph, many batches, then all kernels in all dtypes."""
    report.attempt("machine", lambda: report.add("machine", machine.describe(device)))
    report.attempt("penalty", partial(smoke_penalty, report, device))
    report.attempt("train step", partial(smoke_step, report, device))
    report.attempt("graph", partial(smoke_graph, report, device))
    report.attempt("train graphs", partial(smoke_train_graphs, report, device))
    report.attempt("many batches", partial(many_batches, report, device))
    cases = [*row_cases(5, 64, 96), rotary_case(1, 2, 7, 64), *attention_cases(small=True)]
    # What a machine without bf16 arithmetic takes long for is proved once.
    for dtype in KERNEL_DTYPES[2:] if small else KERNEL_DTYPES:
        for case in cases:
            for backend in every_backend(device, dtype):
                report.attempt(
                    f"{case.name} {backend} {dtype}",
                    partial(check_case, report, case, dtype, device, backend),
                )


def smoke_penalty(report: Report, device: str) -> None:
    block, h, _ = build_block(SHAPES["ouro"].small(), device, torch.bfloat16)
    loss = fused_jsrr(block, h)
    loss.backward()
    norms = [p.grad.norm() for p in block.parameters() if p.grad is not None]
    entry = {"what": "fused_jsrr", "loss": loss.item(), "gradient": torch.stack(norms).sum().item()}
    report.add("smoke", entry)
    if not all(torch.isfinite(torch.tensor(x)) for x in (entry["loss"], entry["gradient"])):
        report.fail(f"smoke: {entry}")


def smoke_step(report: Report, device: str) -> None:
    steps = Steps(Bench("tiny", device, usual_precision(device), 64, 1, 1), STEP_CASES["stars"])
    steps.prepare()
    if steps.failed is None:
        steps()
    report.add("smoke", {"what": "train_step", "failed": steps.failed, "notes": steps.notes})
    if steps.failed is not None:
        report.fail(f"train_step: {steps.failed}")


def smoke_graph(report: Report, device: str) -> None:
    if device != "cuda":
        report.add("smoke", {"what": "graph", "left out": "needs a GPU"})
        return
    block, h, u = build_block(replace(SHAPES["ouro"].small(), layers=1), device, torch.bfloat16)
    entry = {"what": "graph", "difference": graph_difference(block, h, u)}
    report.add("smoke", entry)
    if not entry["difference"] <= 1e-3:
        report.fail(f"smoke: {entry}")


def smoke_train_graphs(report: Report, device: str) -> None:
    """A micro-batch of a step by the trainer's graphs, beside the same ops one by one; the first
    replay comes right after the capture, the second reads another micro-batch."""
    bench = Bench("tiny", device, usual_precision(device), 64, 1, 2)
    config, world = bench.config(STEP_CASES["stars"], graphs=True), World(0, 1, bench.device)
    loss, batches = StepLoss(OuroLoop(bench.model), config), copy(bench.batches)
    casts = partial(autocast, config.precision, bench.device, sharded=False)
    with stand_in() if device == "cpu" else nullcontext():
        notes = set_up_graphs(loss, batches, config, world, True, print).notes
    captured, gradients = loss.between, loss.gradients
    assert gradients is not None
    loss.low.refresh()
    worst = 0.0
    for turns in (3, 5, 3):
        for step in (0, 1):
            batch = batches.window(step)[0]
            found = []
            for between in (run_between, captured):
                gradients.zero()
                loss.between = between
                with loss.low.used():
                    with casts():
                        plan = StepPlan(step, [turns], 0.1, 0.0)
                        total, _ = loss(batch, plan, turns, len(batch.labels))
                    total.backward()
                found.append([total.detach().clone(), *(flat.clone() for flat in gradients.flat)])
            for one, other in zip(*found, strict=True):
                off = (one - other).norm() / one.norm()
                worst = max(worst, off.item())
    report.add("smoke", {"what": "train graphs", "difference": worst, "notes": notes})
    if not worst <= CLOSE:
        report.fail(f"train graphs: off by {worst}")


def many_batches(report: Report, device: str) -> None:
    """More than a grid has places on its second and third axis."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [
        torch.randn(2, 66_000, 1, 3, 16, device=device, dtype=dtype).requires_grad_()
        for _ in range(3)
    ]
    out = ops.attention(*leaves, causal=True)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    finite = all(bool(x.isfinite().all()) for x in (out, *grads))
    # The first query sees one key.
    first = (out[:, :, :, 0].float() - leaves[2][:, :, :, 0].float()).abs().max().item()
    report.add("smoke", {"what": "many batches", "finite": finite, "first": first})
    if not (finite and first == 0):
        report.fail(f"many batches: finite {finite}, first query off by {first}")
