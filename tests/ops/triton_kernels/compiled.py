"""What the compiler makes of the Triton kernels, without a GPU: registers, spills, shared memory,
instructions.

A module of this folder names its launches in `CASES: dict[str, Callable[[], object]]`: each calls
launchers of `stars_fast.ops.triton` on meta tensors. Triton specialises and compiles the kernels
as for a call on that GPU, but launches nothing. As a command it prints a table:

    python tests/ops/triton_kernels/compiled.py [--arch sm_80 sm_90] [--only REGEX] [MODULE ...]

With --variants it prints instead how many compiled kernels a case makes of each.

Tests call `compiled` and `variants`, which run that command in another process, because the tests'
own process interprets kernels. To test another Triton, put it first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ARCHITECTURES = ("sm_80", "sm_90")
# Instructions counted in the machine code.
COUNTED = ("HMMA", "HGMMA", "LDGSTS", "LDG.E.128", "BAR.SYNC")
# Bytes of shared memory that a block may have.
SHARED_LIMIT = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448}


def compiled(module: str, arches: tuple[str, ...] = ARCHITECTURES, only: str = "") -> list[dict]:
    """One dict a kernel that the CASES of `module` launch: case, kernel, arch, warps, stages,
    shared (bytes), registers, spill_stores and spill_loads (bytes a thread), serialised (wgmma),
    products (by wgmma), waits (for all of those under way), alone (arrivals at barriers in shared
    memory by one thread before its warps have met), and the counts of COUNTED in small letters."""
    return _command("--only", only, "--arch", *arches, "--", module)


def variants(module: str, only: str) -> dict[str, int]:
    """How many compiled kernels each kernel becomes in the CASES of `module`."""
    return _command("--variants", "--only", only, "--arch", "sm_90", "--", module)


def _command(*arguments: str) -> Any:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "compiled.py"), "--json", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class _Driver:
    """As much of a Triton driver as compilation asks for."""

    def __init__(self, arch: str) -> None:
        self.number = int(arch.removeprefix("sm_"))

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.number, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def target(arch: str, launched: Callable[..., object]) -> Iterator[None]:
    """Inside, the GPU is an `arch`, and a launch calls `launched(kernel, run, args, kwargs)`, where
    `run(kernel, *args, warmup=True, **kwargs)` compiles."""
    import torch
    import triton
    from triton.runtime.jit import JITFunction

    from stars_fast.ops.triton import tiles

    driver = _Driver(arch)
    before = JITFunction.run, torch.cuda.get_device_capability

    def run(kernel: JITFunction, *args: object, warmup: bool, **kwargs: object) -> None:
        launched(kernel, before[0], args, kwargs)

    triton.runtime.driver.set_active(driver)
    JITFunction.run = run
    torch.cuda.get_device_capability = lambda device=None: divmod(driver.number, 10)
    tiles.architecture.cache_clear()
    try:
        yield
    finally:
        JITFunction.run, torch.cuda.get_device_capability = before
        tiles.architecture.cache_clear()


def _compile(kernel, run, args: tuple, kwargs: dict) -> dict:
    kernel.device_caches.clear()  # what is there already is not compiled and has no log
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        binary = run(kernel, *args, warmup=True, **kwargs)
    text, sass = log.getvalue(), binary.asm["sass"]
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.search(r"Used (\d+) registers", text)
    if spills is None or registers is None:
        raise RuntimeError(f"{kernel.__name__}: no figures in the log of ptxas:\n{text}")
    return {
        "kernel": kernel.__name__,
        "warps": binary.metadata.num_warps,
        "stages": binary.metadata.num_stages,
        "shared": binary.metadata.shared,
        "registers": int(registers[1]),
        "spill_stores": int(spills[1]),
        "spill_loads": int(spills[2]),
        "serialised": "wgmma.mma_async instructions are serialized" in text,
        "products": len(re.findall(r"warp_group_dot\b", binary.asm["ttgir"])),
        "waits": len(re.findall(r"warp_group_dot_wait.*pendings = 0", binary.asm["ttgir"])),
        "alone": _arrivals_alone(binary.asm["ptx"]),
        **{name.lower(): sass.count(name) for name in COUNTED},
    }


def _arrivals_alone(ptx: str) -> int:
    """How often a thread arrives at a barrier in shared memory for others that it has not met."""
    lines = [line.strip() for line in ptx.splitlines()]
    code = [line for line in lines if line and not line.startswith((".loc", "//", "add.s32"))]
    return sum(
        "mbarrier.arrive.shared" in line and not before.startswith("bar.sync")
        for before, line in pairwise(code)
    )


def _variants(modules: list[str], arches: list[str], only: str) -> dict[str, int]:
    from triton.runtime.jit import JITFunction

    found: dict[str, set[str]] = {}

    def compile_nothing(kernel: JITFunction, key: str, *rest: object) -> None:
        found.setdefault(kernel.__name__, set()).add(key)

    JITFunction._do_compile = compile_nothing
    for arch, case in product(arches, _cases(modules, only)):
        with target(
            arch, lambda kernel, run, args, kwargs: run(kernel, *args, warmup=True, **kwargs)
        ):
            case[1]()
    return {kernel: len(keys) for kernel, keys in found.items()}


def _cases(modules: list[str], only: str) -> list[tuple[str, Callable[[], object]]]:
    cases = [case for name in modules for case in importlib.import_module(name).CASES.items()]
    return [case for case in cases if re.search(only, case[0])]


def _figures(modules: list[str], arches: list[str], only: str) -> Iterator[dict]:
    for arch, (case, launch) in product(arches, _cases(modules, only)):
        found: list[dict] = []
        with target(arch, lambda *run, found=found: found.append(_compile(*run))):
            launch()
        yield from ({"case": case, "arch": arch} | figures for figures in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", help="test modules (default: every *_compiled)")
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--only", default="", help="regular expression that a case's name holds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    if options.variants:
        print(json.dumps(_variants(options.modules, options.arch, options.only)))
        return
    modules = options.modules or sorted(path.stem for path in FOLDER.glob("test_*_compiled.py"))
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {
            "TRITON_CACHE_DIR": cache,
            "TRITON_ALWAYS_COMPILE": "1",
            "TRITON_DUMP_PTXAS_LOG": "1",
        }
        figures = _figures(modules, options.arch, options.only)
        if options.json:
            print(json.dumps(list(figures)))
            return
        for index, row in enumerate(figures):
            if index == 0:
                print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
