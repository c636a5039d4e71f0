"""Peak memory of forward + backward, and where a way runs out of it.

What counts is what a pass takes beyond weights, their gradients, and what is loaded once: a first
pass over 32 tokens of one sample leaves those behind.
"""

from __future__ import annotations

import gc
import math
import resource
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.blocks import Shape, build_block
from benchmarks.report import FULL, out_of_memory
from benchmarks.timing import cuda_growth, in_its_own_process, process_growth
from benchmarks.ways import bind
from stars_fast import ops


def limit_mib(device: torch.device | str, given: float | None) -> float:
    """The limit in MiB: as given, or 80 % of what is free on the device."""
    from stars_fast.training.scale.budget import free_memory

    if given is not None:
        return given
    free = free_memory(torch.device(device))
    return math.inf if free is None else 0.8 * free / 2**20


def way_growth(
    way: str, shape: Shape, device: str, dtype: torch.dtype, limit: float, backend: str | None
) -> float | None:
    """MiB of a pass at its peak; None where it needs more than `limit` MiB. On the CPU in a process
    of its own.

    Raises:
        RuntimeError: the way fails for another reason.
    """
    name = str(dtype).removeprefix("torch.")
    cell: dict[str, Any] = {"way": way, "shape": asdict(shape), "device": device, "dtype": name}
    cell |= {"limit": limit, "backend": backend, "threads": torch.get_num_threads()}
    if torch.device(device).type == "cuda":
        return in_this_process(**cell)
    return in_its_own_process(f"{__name__}:in_this_process", **cell)


def in_this_process(
    way: str,
    shape: dict[str, Any],
    device: str,
    dtype: str,
    limit: float,
    backend: str | None,
    threads: int,
) -> float | None:
    """As `way_growth`; on the CPU only the first such call of a process tells."""
    torch.set_num_threads(threads)
    sizes = Shape(**shape)
    cuda = torch.device(device).type == "cuda"
    found: float | None
    try:
        block, h, u = build_block(sizes, device, getattr(torch, dtype))
        loss = bind(way, block)
        run = partial(_pass, loss, h, u)
        with ops.backend(backend):
            _pass(loss, h[:1, :32], u[:1, :32])
            with _cuda_limit(limit) if cuda else _address_limit(limit):
                found = (cuda_growth if cuda else process_growth)(run)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        found = None
    release(device)
    return None if found is None or found > limit else round(found, 2)


def against_length(
    ways: Iterable[str],
    lengths: Sequence[int],
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    limit: float,
    backend: str | None,
) -> dict[str, dict[str, Any]]:
    """{length: {way: MiB or why not}}; a way that failed is not run at greater lengths: None."""
    rows: dict[str, dict[str, Any]] = {}
    over: set[str] = set()
    for length in sorted(lengths):
        row = rows[str(length)] = {}
        for way in ways:
            if way in over:
                row[way] = None
                continue
            try:
                found = way_growth(
                    way, replace(shape, length=length), device, dtype, limit, backend
                )
            except RuntimeError as error:
                row[way] = str(error).splitlines()[0][:80]
            else:
                row[way] = FULL if found is None else found
            if isinstance(row[way], str):
                over.add(way)
    return rows


def columns(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Columns of the table of `against_length`."""
    return {way: (f"{way}, MiB", ".1f") for row in rows.values() for way in row}


def release(device: torch.device | str) -> None:
    """Give back what a pass that failed still holds."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _pass(loss: Any, h: torch.Tensor, u: torch.Tensor) -> None:
    loss(h, u).backward()


@contextmanager
def _address_limit(mib: float) -> Any:
    """This process may take so much more address space: what asks for more is refused."""
    statm = Path("/proc/self/statm")
    if mib == math.inf or not statm.exists():
        yield
        return
    taken = int(statm.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + int(mib * 2**20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _cuda_limit(mib: float) -> Any:
    """The allocator refuses more than this beyond what is allocated."""
    if mib == math.inf:
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    share = (torch.cuda.memory_reserved() + mib * 2**20) / total
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
