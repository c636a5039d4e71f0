"""Build entry: the package, and the compiled kernels of `csrc/`.

`STARS_FAST_BUILD` says which kernels: `none`, `cpu`, or `cuda`, which includes cpu. It is an error
if they can't be built. Without it the cpu ones are built where a trial file compiles and links
against torch, and left out with a warning elsewhere. Kernels need torch at build time:
`pip install --no-build-isolation .`; an isolated build is pure Python.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from glob import glob
from typing import Any

import setuptools
from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

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
NAMED = os.environ.get("STARS_FAST_BUILD") or None
IS_TRIAL = "STARS_FAST_TRIAL" in os.environ


def extension(target: str) -> Extension:
    """The kernels, or the trial file in their place."""
    import torch
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    version = f"-DTORCH_TARGET_VERSION=0x{TORCH[0]:02x}{TORCH[1]:02x}000000000000"
    flags = {"cxx": [*CXX_FLAGS, version], "nvcc": ["-O3", version]}
    folder = "csrc/trial" if IS_TRIAL else "csrc"
    sources = sorted(glob(f"{folder}/cpu/*.cpp"))
    kind = CppExtension
    if target == "cuda":
        if torch.version.cuda is None:
            raise RuntimeError(f"torch {torch.__version__} is a build without CUDA")
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
        kind = CUDAExtension
        flags["cxx"].append("-DUSE_CUDA")
        sources += sorted(glob(f"{folder}/cuda/*.c*"))
    return kind("stars_fast._native", sources, extra_compile_args=flags, py_limited_api=True)


def trial(target: str) -> str | None:
    """Build the trial file as the kernels are built; the first error, if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        where = ["--build-lib", folder, "--build-temp", folder]
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", *where],
            env={**os.environ, "STARS_FAST_BUILD": target, "STARS_FAST_TRIAL": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror:|(cannot|not) f(i|ou)nd", line)]
    return (errors or lines[-1:] or [f"exit code {done.returncode}"])[0]


def kernels(target: str) -> dict[str, Any]:
    """Arguments of `setup` for the compiled kernels."""
    obstacle, base = None, build_ext
    try:
        module = extension(target)
        from torch.utils.cpp_extension import BuildExtension as base
    except Exception as error:
        module = Extension("stars_fast._native", [])
        obstacle = str(error).strip().partition("\n")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            obstacle = "torch is not in the build environment (pip install --no-build-isolation .)"
    try:
        wheel_command = Distribution().get_command_class("bdist_wheel")
    except BaseError:
        sys.exit(
            f"stars_fast: setuptools {setuptools.__version__} can't make a wheel by itself: "
            'pip install "setuptools>=77"'
        )

    class Build(base):
        def run(self) -> None:
            problem = obstacle or (None if IS_TRIAL else trial(target))
            if problem is None:
                try:
                    return super().run()
                except Exception as error:
                    if NAMED:
                        raise
                    problem = str(error).strip().partition("\n")[0]
            if NAMED:
                sys.exit(f"STARS_FAST_BUILD={target} can't be built: {problem}")
            print(f"stars_fast: built without compiled kernels: {problem}", file=sys.stderr)
            self.extensions = self.distribution.ext_modules = []

        def get_ext_filename(self, name: str) -> str:
            # No symbol of Python is used: no Python version in the name.
            return os.path.join(*name.split(".")) + f".torch{TORCH[0]}.{TORCH[1]}.so"

    class Wheel(wheel_command):
        def run(self) -> None:
            self.run_command("build")
            self.root_is_pure = not self.distribution.has_ext_modules()
            super().run()

        def get_tag(self) -> tuple[str, str, str]:
            tag = super().get_tag()
            return tag if self.root_is_pure else ("py3", "none", tag[2])

    return {"ext_modules": [module], "cmdclass": {"build_ext": Build, "bdist_wheel": Wheel}}


if NAMED not in (None, "none", "cpu", "cuda"):
    sys.exit(f"STARS_FAST_BUILD: expected none, cpu or cuda, got {NAMED!r}")
setup(**({} if NAMED == "none" else kernels(NAMED or "cpu")))
