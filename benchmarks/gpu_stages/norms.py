"""The norms by Triton and by CUDA C++; the extension is built beside the other stages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import op
from benchmarks.gpu_stages.operations import time_cases
from benchmarks.gpu_stages.report import Report
from stars_fast.ops import library

ROOT = Path(__file__).parents[2]
NORMS = ("rms_norm", "layer_norm", "sandwich")


def norms(report: Report, device: str, small: bool) -> None:
    """Forward and backward by every backend that is here."""
    if device == "cuda" and not library.has("cuda", device):
        report.fail("the CUDA C++ kernels are not here")
    pairs = [pair for pair in op.op_cases(device, small) if pair[0].name in NORMS]
    time_cases(report, device, small, pairs, flex=False)


def architecture() -> str:
    """That of the first GPU, like "9.0", by asking its driver: this process must not touch the GPU,
    or it could not fork; all that the build is made for where that does not say."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return found.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "8.0;9.0+PTX"


def build_extension(folder: Path, device: str) -> subprocess.Popen[bytes]:
    """Begin to build the extension in a copy of the package under `folder`, beside what is timed
    and out of its way. Without a GPU the package is copied as it is and nothing is compiled."""
    for name in ("stars_fast", "csrc", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, folder)
    environment = {**os.environ, "STARS_FAST_BUILD": "none", "MAX_JOBS": "6"}
    if device == "cuda":
        environment |= {"STARS_FAST_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": architecture()}
    command = ["nice", "-n", "19", sys.executable, "setup.py", "build_ext", "--inplace"]
    with open(folder / "build.log", "wb") as log:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
