"""The machine, the versions, and what the machine can do at best."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import stars_fast
from stars_fast.bench.timing import interleaved


def describe(device: torch.device | str) -> dict[str, Any]:
    """What a figure was measured on."""
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "triton": version_of("triton") if cuda else None,
        "python": platform.python_version(),
        "stars_fast": stars_fast.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def version_of(package: str) -> str | None:
    """The installed version of a package, None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit that is measured, "+" where the tree differs from it; None outside of a clone."""
    folder = Path(stars_fast.__file__).resolve().parents[1]
    if not (folder / ".git").exists():
        return None
    run = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=7"]
    try:
        found = subprocess.run([*run, "--exclude=*"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def peaks(device: torch.device | str, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of a large matrix product and bytes/s (read and written) of a large copy, the best of
    several."""
    cuda = torch.device(device).type == "cuda"
    size = 8192 if cuda else (1024 if dtype == torch.float32 else 256)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    # Written once: memory that never was is a single page.
    source = torch.ones(2**30 if cuda else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ways = {"gemm": lambda: a @ b, "copy": lambda: target.copy_(source)}
    times = interleaved(ways, 10, device)
    return {
        "gemm_flops": 2 * size**3 / min(times["gemm"]),
        "copy_bytes": 2 * source.numel() / min(times["copy"]),
    }
