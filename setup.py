"""Build entry: the package, and the compiled kernels of `csrc/`.

`STARS_FAST_BUILD` says which kernels: `none`, `cpu`, or `cuda`, which includes cpu. It is an error
if they can't be built. Without it the cpu ones are built where a trial file compiles and links
against torch, and left out with a warning elsewhere. Kernels need torch at build time:
`pip install --no-build-isolation -e .`; an isolated build is pure Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from glob import glob

import setuptools
from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

# The oldest torch whose stable ABI the extension uses; the file's name carries it. It can be built
# by that torch and by newer ones.
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
REFUSAL = "STARS_FAST_BUILD={} can't be built: "
BUILDS = ("build", "build_py", "build_ext", "build_clib")
IS_TRIAL = "STARS_FAST_TRIAL" in os.environ


def extension(target: str) -> Extension:
    """The kernels, or the trial file in their place."""
    import torch
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    if torch.__version__ < TORCH:  # a TorchVersion, which compares with numbers
        raise RuntimeError(
            f"torch: expected {TORCH[0]}.{TORCH[1]} or newer, whose stable ABI the kernels use, "
            f"got {torch.__version__}"
        )
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
    found = (errors or lines[-1:] or [f"exit code {done.returncode}"])[0]
    return found.removeprefix(REFUSAL.format(target))


def kernels(target: str) -> tuple[Extension, type[build_ext]]:
    """The extension, and the command that builds it or leaves it out."""
    obstacle, base = None, build_ext
    try:
        module = extension(target)
        from torch.utils.cpp_extension import BuildExtension as base
    except Exception as error:
        module, obstacle = Extension("stars_fast._native", []), first_line(error)
        if isinstance(error, ImportError):
            obstacle = (
                "torch is not in the build environment (pip install --no-build-isolation -e .): "
                + obstacle
            )

    class Build(base):
        def run(self) -> None:
            self.force = True  # times of sources tell nothing of headers, nor of another target
            problem = obstacle or (None if IS_TRIAL else trial(target))
            if problem is None:
                try:
                    return super().run()
                except Exception as error:
                    if NAMED and not IS_TRIAL:
                        raise
                    problem = first_line(error)
            if NAMED:
                sys.exit(REFUSAL.format(target) + problem)
            print(f"stars_fast: built without compiled kernels: {problem}", file=sys.stderr)
            self.extensions = self.distribution.ext_modules = []

        def get_ext_filename(self, name: str) -> str:
            # No symbol of Python is used: no Python version in the name.
            return os.path.join(*name.split(".")) + f".torch{TORCH[0]}.{TORCH[1]}.so"

    return module, Build


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def wheel() -> dict[str, type]:
    """The command that makes a wheel for any Python, where there is one."""
    try:  # of setuptools since 70.1, else of the package wheel
        base = Distribution().get_command_class("bdist_wheel")
    except BaseError:
        if {"bdist_wheel", "dist_info", "editable_wheel"} & set(sys.argv):
            sys.exit(
                f"stars_fast: setuptools {setuptools.__version__} can't make a wheel by itself: "
                'pip install "setuptools>=77"'
            )
        return {}

    class Wheel(base):
        def run(self) -> None:
            before = os.path.join(self.get_finalized_command("build").build_lib, "stars_fast")
            # Modules that are gone since would be in the wheel, and be found by being there; but
            # what this very command has built is not built again.
            built = any(self.distribution.have_run.get(name) for name in BUILDS)
            if not built and os.path.realpath(before) != os.path.realpath("stars_fast"):
                shutil.rmtree(before, ignore_errors=True)
            self.run_command("build")  # which may leave the kernels out
            self.skip_build = True  # it is done, and would compile everything once more
            self.root_is_pure = not self.distribution.has_ext_modules()
            super().run()

        def get_tag(self) -> tuple[str, str, str]:
            tag = super().get_tag()
            return tag if self.root_is_pure else ("py3", "none", tag[2])

    return {"bdist_wheel": Wheel}


if NAMED not in (None, "none", "cpu", "cuda"):
    sys.exit(f"STARS_FAST_BUILD: expected none, cpu or cuda, got {NAMED!r}")
commands, modules = wheel(), []
if NAMED != "none":
    module, commands["build_ext"] = kernels(NAMED or "cpu")
    modules = [module]
setup(
    license="Apache-2.0",  # pyproject.toml's own form of it needs setuptools 77
    ext_modules=modules,
    cmdclass=commands,
)
