"""Options of the pytest-benchmark suites.

    pytest benchmarks --benchmark-only [--bench-device cuda] [--bench-dtype bfloat16]

A test asserts that what it times is right, then times it. Sizes are small on the CPU;
`python -m benchmarks` measures figures for the record.
"""

import pytest
import torch

from benchmarks.machine import usual_dtype
from benchmarks.timing import waiter


def pytest_addoption(parser):
    group = parser.getgroup("stars_fast")
    group.addoption("--bench-device", choices=("cpu", "cuda"), default="cpu")
    group.addoption("--bench-dtype", choices=("float32", "bfloat16", "float16"), default=None)


@pytest.fixture(scope="session")
def device(request):
    name = request.config.getoption("--bench-device")
    if name == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--bench-device: expected a CUDA device, none is there")
    return name


@pytest.fixture(scope="session")
def dtype(request, device):
    return getattr(torch, request.config.getoption("--bench-dtype") or usual_dtype(device))


@pytest.fixture
def timed(benchmark, device):
    """Time a run, on CUDA until the device is done, with what is known about it beside."""

    def time(run, group, rounds, **extra):
        wait = waiter(device)
        benchmark.group = group
        benchmark.extra_info.update(extra)
        benchmark.pedantic(lambda: (run(), wait()), rounds=rounds, warmup_rounds=2)

    return time
