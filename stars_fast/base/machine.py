"""The machine and the versions that a figure was measured on."""

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


def describe(device: torch.device | str) -> dict[str, Any]:
    """The machine and versions that a figure was measured on."""
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
