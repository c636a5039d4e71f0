"""Forward + backward of a block, plain and every way to its penalty that is not compiled."""

from functools import cache, partial

import pytest

from benchmarks import ways
from benchmarks.blocks import SHAPES, Shape, build_block
from benchmarks.counting import count

SUITE_SHAPES = {
    "cpu": {
        "pre-norm": Shape(128, 4, 352, layers=2, batch=2, length=256),
        "sandwich": Shape(128, 4, 352, layers=2, batch=2, length=256, kind="sandwich"),
        "short": Shape(128, 4, 352, layers=2, batch=32, length=16),
    },
    "cuda": {"pre-norm": SHAPES["study"], "sandwich": SHAPES["ouro"], "short": SHAPES["addition"]},
}


@cache
def made(name, device, dtype):
    block, h, u = build_block(SUITE_SHAPES[device][name], device, dtype)
    return block, h, u, ways.Exact(block, h, u)


@pytest.mark.parametrize("way", ways.WAYS)
@pytest.mark.parametrize("name", SUITE_SHAPES["cpu"])
def test_block(timed, device, dtype, name, way):
    why = ways.missing(way, device)
    if why:
        pytest.skip(why)
    block, h, u, exact = made(name, device, dtype)
    loss = ways.bind(way, block)
    error = exact.error(way, loss)
    assert error <= ways.tolerance(way, dtype)
    run = partial(ways.forward_backward, loss, block, h, u)
    flops, moved = count(run)
    timed(run, name, rounds=5, error=error, gflop=flops / 1e9, gbyte=moved / 1e9)
