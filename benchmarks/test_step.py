"""Times of whole training steps of a tiny Ouro by method, the published way and ours.

pytest benchmarks/test_step.py --benchmark-only
"""

import pytest
import torch

from benchmarks.agreement import check_agreement
from benchmarks.machine import usual_precision
from benchmarks.step_cases import STEP_CASES
from benchmarks.step_runs import Bench, Steps
from benchmarks.timing import waiter
from stars_fast.training.step.precision import PRECISIONS

ROUNDS = 5


@pytest.fixture(scope="module")
def bench(request):
    """Shared by the cases, once the published way has been seen to compute what ours does."""
    device = request.config.getoption("--bench-device", default="cpu")
    precision = precision_of(device, request.config.getoption("--bench-dtype", default=None))
    shared = Bench("tiny", device, precision, tokens=None, repeats=ROUNDS, layers=None)
    check_agreement(shared.fields, torch.device(device), precision)
    return shared


def precision_of(device, dtype):
    """The trainer's precision of that name; without one the usual of the device."""
    if dtype not in (None, *PRECISIONS):
        raise pytest.UsageError(
            f"--bench-dtype: expected float32 or bfloat16 for whole steps, got {dtype}"
        )
    return dtype or usual_precision(device)


@pytest.mark.parametrize("name", STEP_CASES)
def test_step(benchmark, bench, name):
    case = STEP_CASES[name]
    steps = Steps(bench, case)
    steps.prepare()
    assert steps.failed is None, steps.failed
    wait = waiter(bench.device)

    def step():
        steps()
        wait()

    benchmark.group = "step"
    benchmark.extra_info.update(
        device=str(bench.device),
        precision=bench.precision,
        tokens=bench.real_tokens(1),
        gflop=bench.flops(case, 1, bench.turns(case, 1), recomputed=True) / 1e9,
        paper=case.paper,
    )
    benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=1)
