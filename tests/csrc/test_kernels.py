"""The C++ kernels without torch or Python, under the address and undefined-behaviour sanitizers."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CPU = HERE.parents[1] / "csrc" / "cpu"
SANITIZED = "-std=c++17 -O0 -fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.slow
def test_kernels_stay_within_their_memory_and_instruction_sets_agree(tmp_path):
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not shutil.which(compiler[0]):
        pytest.skip(f"no C++ compiler ({compiler[0]})")
    sources = [HERE / "kernels_check.cpp", *sorted(CPU.glob("*.cpp"))]
    sources.remove(CPU / "ops.cpp")
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    builds = [
        subprocess.Popen([*compiler, *SANITIZED.split(), "-c", source, "-o", target])
        for source, target in zip(sources, objects, strict=True)
    ]
    assert [build.wait() for build in builds] == [0] * len(builds)
    program = tmp_path / "kernels"
    subprocess.run([*compiler, *SANITIZED.split(), *objects, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *names, compared = done.stdout.split()
    assert names[0] == "baseline"
    assert int(compared) > 100_000
