"""`python -m benchmarks block`: forward + backward of a block, plain and every way to its penalty.

Each way's gradient is compared with fp64 first (on at most two layers, two samples and 256 tokens);
then all take turns. Memory is that of a pass beyond weights and gradients, on the CPU in a process
of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile

from benchmarks import growth
from benchmarks.blocks import KINDS, SHAPES, Shape, build_block
from benchmarks.counting import count
from benchmarks.machine import measured_peaks
from benchmarks.report import FULL, Row, note, reason, show, with_rates, write
from benchmarks.timing import Clock, in_its_own_process, interleaved, process_clock
from benchmarks.ways import (
    COMPILED,
    NAMES,
    OURS,
    Exact,
    Loss,
    bind,
    eager,
    figures,
    forward_backward,
    missing,
    tolerance,
)
from stars_fast import explain, ops
from stars_fast.base import machine
from stars_fast.base.errors import ConfigError

MEMORY_WAYS = ("plain", "dual", "double_backward", "func_jvp", "autograd_jvp")
_PATIENCE = 180.0
"""Seconds that a compiled way gets to compile and run."""
_SIZES = ("width", "heads", "d_ff", "layers", "batch", "length", "kind")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this level alone."""
    defaults = Shape()
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=list(SHAPES),
        metavar="NAME",
        help=f"of {', '.join(SHAPES)} (default: study and addition on the CPU, ouro and ouro-8k "
        "on CUDA), or sizes:",
    )
    for name in _SIZES[:-1]:
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, help=f"(default {getattr(defaults, name)})")
    parser.add_argument("--kind", choices=list(KINDS), help=f"(default {defaults.kind})")
    parser.add_argument(
        "--ways", nargs="+", choices=NAMES, metavar="WAY", help=f"of {'; '.join(NAMES)}"
    )
    parser.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="time CPU seconds of the process in place of wall seconds: on a busy machine, with "
        "--threads 1",
    )
    parser.add_argument(
        "--memory", type=_lengths, metavar="512,1024", help="memory against these lengths, no times"
    )
    parser.add_argument(
        "--profile", action="store_true", help="where the time of each way goes, no times"
    )


def run(options: argparse.Namespace) -> int:
    """Measure; 1 if one of our ways is wrong or fails.

    Raises:
        ConfigError: options that do not go together.
    """
    shapes = _shapes(options)
    names = list(options.ways or (MEMORY_WAYS if options.memory else NAMES))
    if options.small and not options.ways:  # to compile takes minutes, which proves little
        names = [name for name in names if not name.endswith(COMPILED)]
    dtype, backend = getattr(torch, options.dtype), options.backend
    if options.profile:
        _profile_all(shapes, names, options.device, dtype, backend)
        return 0
    limit = growth.limit_mib(options.device, options.memory_limit)
    result: dict[str, Any] = {
        "machine": machine.describe(options.device),
        "dtype": options.dtype,
        "shapes": {name: asdict(shape) for name, shape in shapes.items()},
        "memory_limit": round(limit, 1),
        "clock": "CPU seconds of the process" if options.cpu_seconds else "wall seconds",
    }
    if options.memory:
        result["memory"] = {}
        for label, shape in shapes.items():
            print(_title(label, shape, options.dtype))
            rows = growth.against_length(
                names, options.memory, shape, options.device, dtype, limit, backend
            )
            show(rows, growth.columns(rows))
            result["memory"][label] = rows
        write(options.json, result)
        return 0
    note("the machine's peaks")
    result["peaks"] = measured_peaks(options.device, dtype)
    result["rows"], result["backends"], result["gate"] = {}, {}, {}
    for label, shape in shapes.items():
        print(_title(label, shape, options.dtype))
        block, h, u = build_block(shape, options.device, dtype)
        with ops.backend(backend):
            result["backends"][label] = explain(block, h).backends
            clock = process_clock if options.cpu_seconds else None
            rows = way_rows(names, shape, block, h, u, options.repeats, clock)
        again = measured_peaks(options.device, dtype)  # a shared machine has better moments
        result["peaks"] = {key: max(peak, again[key]) for key, peak in result["peaks"].items()}
        for name, row in rows.items():
            if "failed" not in row:
                note(f"memory and arithmetic of {name}")
                rows[name] = _completed(
                    name, row, shape, block, h, u, result["peaks"], limit, options
                )
        show(rows)
        result["rows"][label] = rows
        result["gate"][label] = {
            "against": "fp64 gradient of all weights, for the same weights and inputs",
            "shape": asdict(shape.checked()),
        }
        write(options.json, result)
    bad = [
        f"{label}: {name}"
        for label, rows in result["rows"].items()
        for name, row in rows.items()
        if name in OURS and (row.get("wrong") or "failed" in row)
    ]
    for name in bad:
        print(f"FAILED {name}")
    return 1 if bad else 0


def way_rows(
    names: Sequence[str],
    shape: Shape,
    block: nn.Module,
    h: Tensor,
    u: Tensor,
    repeats: int,
    clock: Clock | None = None,
) -> dict[str, Row]:
    """Time and error of each way, in the order of `names`; `plain` is always there, the others'
    unit. A way that does not run has a row that says why.

    Errors are those of `shape.checked()`: few layers and tokens, so that the fp64 of the check
    takes no memory from what is timed, and a tolerance holds whatever the depth.
    """
    names = ["plain", *(name for name in names if name != "plain")]
    losses: dict[str, Loss] = {}
    errors: dict[str, float | None] = {}
    failed: dict[str, Row] = {}
    checked = _errors(names, shape, h.device, h.dtype)
    for name in names:
        found = checked[name]
        if isinstance(found, str):
            failed[name] = {"failed": found}
            continue
        loss = bind(name, block)
        try:
            forward_backward(loss, block, h, u)  # at its own size: it may not fit
        except Exception as error:  # one that does not run takes no other with it
            failed[name] = {"failed": reason(error)}
            block.zero_grad(set_to_none=True)
            growth.release(h.device)
        else:
            losses[name], errors[name] = loss, found
    if "plain" in failed:
        return {name: failed.get(name, {"failed": "plain failed"}) for name in names}
    runs = {name: partial(forward_backward, loss, block, h, u) for name, loss in losses.items()}
    note(f"times of {len(runs)} ways, {repeats} rounds")
    rows = figures(interleaved(runs, repeats, h.device, clock), errors)
    for name, row in rows.items():
        if not row["error"] <= tolerance(name, h.dtype):
            row["wrong"] = True
    block.zero_grad(set_to_none=True)
    return {name: failed.get(name) or rows[name] for name in names}


def _errors(
    names: Sequence[str], shape: Shape, device: torch.device, dtype: torch.dtype
) -> dict[str, float | str]:
    """The error of each way's gradient, or why it has none."""
    checked = shape.checked()
    block, h, u = build_block(checked, device, dtype)
    exact = Exact(block, h, u)
    found: dict[str, float | str] = {}
    for name in names:
        patience = f" (compiles: up to {_PATIENCE:.0f} s)" if name.endswith(COMPILED) else ""
        note(f"error of {name} against fp64{patience}")
        why = missing(name, device) or _trial(name, checked, device, dtype)
        if why is None:
            try:
                found[name] = exact.error(name, bind(name, block))
                continue
            except Exception as error:  # as where it is timed
                why = reason(error)
        found[name] = why
    del exact, block
    growth.release(device)
    return found


def compiles(way: str, shape: dict[str, Any], device: str, dtype: str) -> None:
    """Run a compiled way, forward and backward. In a process of its own: some crash it."""
    block, h, u = build_block(Shape(**shape), device, getattr(torch, dtype))
    forward_backward(bind(way, block), block, h, u)


def _trial(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a compiled way does not run, None if it does or is not compiled."""
    if not name.endswith(COMPILED):
        return None
    arguments: dict[str, Any] = {"way": name, "shape": asdict(shape), "device": device.type}
    arguments["dtype"] = str(dtype).removeprefix("torch.")
    try:
        in_its_own_process(f"{__name__}:compiles", _PATIENCE, **arguments)
    except RuntimeError as error:
        return str(error)[:200]
    return None


def _completed(
    name: str,
    row: Row,
    shape: Shape,
    block: nn.Module,
    h: Tensor,
    u: Tensor,
    peaks: dict[str, float],
    limit: float,
    options: argparse.Namespace,
) -> Row:
    """The row with its floor, memory, arithmetic and shares of the machine's peaks."""
    from benchmarks.floors import block_floor

    floor = block_floor(eager(name), shape.width, shape.d_ff, shape.length)
    row = row | {"floor": floor}
    compiled = name.endswith(COMPILED)
    if not compiled or options.device == "cuda":  # on the CPU the compiler's memory would count
        try:
            found = growth.way_growth(name, shape, options.device, h.dtype, limit, options.backend)
            row["mib"] = FULL if found is None else found
        except RuntimeError as error:
            row["mib"] = str(error)[:80]
    if not compiled and name != "jvp_flash_attention":  # no operator shows what its kernels do
        with ops.backend(options.backend):
            flops, moved = count(partial(forward_backward, bind(name, block), block, h, u))
        row |= {"gflop": round(flops / 1e9, 3), "gbyte": round(moved / 1e9, 4)}
    return with_rates(row, peaks)


def _shapes(options: argparse.Namespace) -> dict[str, Shape]:
    given = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    if given and options.shape:
        raise ConfigError(f"--shape: expected no sizes beside it, got {', '.join(given)}")
    names = ("ouro", "ouro-8k") if options.device == "cuda" else ("study", "addition")
    try:
        shapes = (
            {"block": Shape(**given)}
            if given
            else {name: SHAPES[name] for name in options.shape or names}
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {name: shape.small() if options.small else shape for name, shape in shapes.items()}


def _title(label: str, shape: Shape, dtype: str) -> str:
    return (
        f"\n{label}: {shape.kind}, d {shape.width}, {shape.heads} heads, d_ff {shape.d_ff}, "
        f"{shape.layers} layers, batch {shape.batch}, length {shape.length}, {dtype}"
    )


def _profile_all(
    shapes: dict[str, Shape],
    names: Sequence[str],
    device: str,
    dtype: torch.dtype,
    backend: str | None,
) -> None:
    for label, shape in shapes.items():
        print(_title(label, shape, str(dtype).removeprefix("torch.")))
        block, h, u = build_block(shape, device, dtype)
        for name in names:
            if missing(name, device) or name.endswith(COMPILED):
                continue
            with ops.backend(backend):
                _profile(name, partial(forward_backward, bind(name, block), block, h, u), device)


def _profile(name: str, step: Callable[[], None], device: str, repeats: int = 5) -> None:
    """Print the arithmetic of the products and each op's share of the time."""
    step()
    with profile(with_flops=True) as found:
        for _ in range(repeats):
            step()
    clock = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, clock))
    total = sum(getattr(row, clock) for row in rows)
    flops = sum(row.flops for row in rows if row.key == "aten::mm") / repeats
    print(f"{name}: {flops / 1e9:.2f} GFLOP in aten::mm, {total / repeats / 1e3:.2f} ms")
    for row in rows[:12]:
        print(f"  {row.key[:60]:<60} {getattr(row, clock) / total:6.1%}")


def _lengths(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"expected lengths like 512,1024, got {text!r}")
    return [int(word) for word in words]
