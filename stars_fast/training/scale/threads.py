"""CPU threads of a process: as many as asked for, or as the machine lends it cores."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

SMALL = 1_000_000
"""Weights of a block below which threads gain little on a free machine, and where anything else
runs beside them lose much: with 0.1 M, two threads took twelve times as long on two busy cores."""

BUSY = 1.5
"""Processes that want to run, a core, from which on threads lose much time to each other."""


def settle_threads(asked: int | None, weights: int | None, device: torch.device) -> list[str]:
    """Set the number of threads, and give lines on what a CPU run should know of it.

    Without a number it is one for a small model on a CPU; else PyTorch's, one for each core of the
    machine or what OMP_NUM_THREADS says, but no more than the cores that a container lends.

    Args:
        asked: `train.threads`.
        weights: of the block; None where that is not known.
        device: that the run computes on.
    """
    if asked is not None:
        torch.set_num_threads(asked)
        return []
    cores = usable_cores()
    if device.type == "cpu" and weights is not None and weights < SMALL:
        cores = 1
    if cores < torch.get_num_threads():
        torch.set_num_threads(cores)
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return []
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < BUSY * cores:
        return []
    return [
        f"warning: {load:.1f} processes want the {cores} cores of this machine, where {threads} "
        "threads wait for each other at every op; --train.threads 1 may be many times faster"
    ]


def usable_cores() -> int:
    """Cores that this process may use: those that it is bound to, or the quota of its control group
    (a container's) where that is less."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota()
    cores = bound or 1
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(folder: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that a control group lends (Linux, version 2); None for no limit."""
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None
