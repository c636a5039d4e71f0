"""Build entry: the package, and the compiled kernels of `csrc/` where the machine can build them.

`STARS_FAST_BUILD` says which: `none`, `cpu`, or `cuda` (which includes cpu). Without it, whatever
can be built is built. What is asked for by name and can't be built is an error. The kernels need
torch at build time: `pip install --no-build-isolation .`; an isolated build is pure Python.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from glob import glob
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

# The oldest torch whose stable ABI the extension uses; the file's name carries it.
TORCH = (2, 11)
CXX_FLAGS = [
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-fopenmp-simd",  # its pragmas only: threads are torch's
    "-fno-math-errno",
    "-fno-trapping-math",  # as the default in what is computed, infinities and NaN included
]


def missing() -> dict[str, str]:
    """What stands in the way of each build."""
    try:
        import torch
    except ImportError:
        return {"cpu": "torch is not in the build environment (pip install --no-build-isolation .)"}
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    try:
        probe = [*compiler, "-x", "c++", "-std=c++17", "-fsyntax-only", "-"]
        subprocess.run(probe, input=b"#include <cmath>", check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return {"cpu": f"no C++ compiler: {' '.join(compiler)!r} does not work (CXX names another)"}
    if torch.version.cuda is None:
        return {"cuda": f"torch {torch.__version__} is a build without CUDA"}
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None or not shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")):
        return {"cuda": "no nvcc (CUDA_HOME names the toolkit)"}
    return {}


def target() -> str:
    """none, cpu or cuda."""
    wanted = os.environ.get("STARS_FAST_BUILD") or None
    if wanted not in (None, "none", "cpu", "cuda"):
        sys.exit(f"STARS_FAST_BUILD: expected none, cpu or cuda, got {wanted!r}")
    if wanted == "none":
        return "none"
    obstacles = missing()
    possible = "none" if "cpu" in obstacles else "cpu" if obstacles else "cuda"
    for name in ("cpu", "cuda") if wanted == "cuda" else (wanted,):
        if name in obstacles:
            sys.exit(f"STARS_FAST_BUILD={wanted} can't be built: {obstacles[name]}")
    if possible == "none":
        print(f"stars_fast: building without compiled kernels: {obstacles['cpu']}", file=sys.stderr)
    return wanted or possible


def extension(target: str) -> dict[str, Any]:
    """Arguments of `setup` for the compiled kernels."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    version = f"-DTORCH_TARGET_VERSION=0x{TORCH[0]:02x}{TORCH[1]:02x}000000000000"
    flags = {"cxx": [*CXX_FLAGS, version], "nvcc": ["-O3", version]}
    sources = sorted(glob("csrc/cpu/*.cpp"))
    kind = CppExtension
    if target == "cuda":
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
        kind = CUDAExtension
        flags["cxx"].append("-DUSE_CUDA")
        sources += sorted(glob("csrc/cuda/*.c*"))

    class Build(BuildExtension):
        def get_ext_filename(self, name: str) -> str:
            # No symbol of Python is used: no Python version in the name.
            return os.path.join(*name.split(".")) + f".torch{TORCH[0]}.{TORCH[1]}.so"

    class Wheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    module = kind("stars_fast._native", sources, extra_compile_args=flags, py_limited_api=True)
    return {"ext_modules": [module], "cmdclass": {"build_ext": Build, "bdist_wheel": Wheel}}


chosen = target()
setup(**({} if chosen == "none" else extension(chosen)))
