"""Every op forward and backward, its dual by backend against PyTorch's plain one."""

import pytest

from benchmarks import cases, op
from benchmarks.counting import count
from stars_fast.ops import library

CASE_NAMES = (*op.OPS[:-1], *(f"attention-{shape}" for shape in "1234"))


@pytest.fixture(scope="session")
def sized(device):
    """(timed, checked) at the sizes of the device."""
    return op.op_cases(device, small=False)


@pytest.mark.parametrize("direction", op.DIRECTIONS)
@pytest.mark.parametrize("way", ["plain", *library.BACKENDS])
@pytest.mark.parametrize("place", range(len(CASE_NAMES)), ids=CASE_NAMES)
def test_op(timed, sized, device, dtype, place, way, direction):
    case, checked = sized[place]
    stacks = [t.to(device, dtype) for t in case.stacks]
    plains = [t.to(device, dtype) for t in case.plains]
    error = None
    if way == "plain":
        runs = op.both_ways(case.torch_op, [*(t[0].clone() for t in stacks), *plains])
    else:
        if way not in cases.backends(device, dtype):
            pytest.skip(f"{way} is not here for {device} and {dtype}")
        found = cases.errors(checked, dtype, device, way)
        if found is None:
            pytest.skip(f"{way} does not have this op")
        error = max(found)
        assert error <= checked.tolerance(dtype)
        runs = op.both_ways(case.op, [*stacks, *plains], way)
    flops, moved = count(runs[direction])
    timed(
        runs[direction],
        f"{case.name} {direction}",
        rounds=10,
        error=error,
        gflop=flops / 1e9,
        gbyte=moved / 1e9,
    )
