"""The CUDA kernels on the CPU (`emulator/`), against the spec in fp64: every shape of thread and
row that a launcher picks, off alignment, with gaps between rows, with guards around everything."""

from functools import partial

import oracle
import pytest
import torch
from cuda_emulator import Emulator, build
from raw_ops import check_rows, norm_case, sandwich_case

pytestmark = pytest.mark.slow  # builds the emulator

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# For 16-bit rows: 16, 32 and 64 threads a row, 128, 256 and 512, twice 512, and without registers;
# the last have no 16-byte vectors. fp32 takes the next shape of each.
WIDTHS = {
    "fp32": [8, 128, 200, 1000, 2048, 4096, 8192, 8200, 1, 33],
    "bf16": [8, 200, 512, 1000, 2048, 4096, 8192, 8200, 1001],
    "fp16": [200, 33],
}
CASES = [(dtype, width, True) for dtype, widths in WIDTHS.items() for width in widths]
CASES += [("fp32", 33, False), ("fp32", 1024, False), ("bf16", 200, False), ("bf16", 8200, False)]
IDS = [f"{dtype}-{width}-{'dual' if dual else 'plain'}" for dtype, width, dual in CASES]


randn = partial(oracle.randn, dtype=torch.float32)
OPS = {"layer_norm": norm_case(True, 2), "sandwich": sandwich_case(True)}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def emulator(library, capfd):
    """Fails on what the sanitizers print."""
    emulator = Emulator(library)
    emulator.device()
    yield emulator
    assert "runtime error" not in capfd.readouterr().err


def check_width(emulator, case, width, dtype, dual, param_dtype=None):
    """More rows than the blocks of the emulated device hold at once, so that blocks take turns."""
    rows = 37 if width <= 64 else 11 if width <= 512 else 3
    check_rows(emulator, case, (rows, width), TYPES[dtype], dual, param_dtype=param_dtype)


def eps_for(width):
    """Normed rows of one or two entries hardly depend on them, unless eps is large."""
    return 0.1 if width < 3 else 1e-5


@pytest.mark.parametrize(("dtype", "width", "dual"), CASES, ids=IDS)
@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
def test_norms(emulator, width, dtype, dual, centre):
    case = norm_case(centre, 1 + centre, eps_for(width))
    check_width(emulator, case, width, dtype, dual, None if centre else torch.float32)


@pytest.mark.parametrize(("dtype", "width", "dual"), CASES, ids=IDS)
@pytest.mark.parametrize("normed", [True, False], ids=["sandwich", "pre-norm"])
def test_sandwich(emulator, width, dtype, dual, normed):
    case = sandwich_case(normed, eps_for(width))
    check_width(emulator, case, width, dtype, dual, None if normed else torch.float32)


LAYOUTS = {"gap": (8, 0), "odd-gap": (3, 0), "unaligned": (0, 1), "gap-unaligned": (16, 3)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 1024), ("bf16", 72)])
def test_layouts(emulator, layout, dtype, width):
    """Where vectors would be misaligned the scalar path is taken: the sanitizer would say."""
    emulator.gap, emulator.shift = LAYOUTS[layout]
    for case in OPS.values():
        check_width(emulator, case, width, dtype, True)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("width", [24, 2048])
def test_few_rows(emulator, rows, width):
    for case in OPS.values():
        check_rows(emulator, case, (rows, width), torch.float32)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)], ids=str)
def test_gradients_that_are_not_asked_for(emulator, wanted):
    x, grad, weight = randn(2, 5, 48), randn(2, 5, 48, seed=1), randn(48, seed=3)
    full = emulator.norm_backward(grad, x, weight, 1e-5, True, True, True, True)
    part = emulator.norm_backward(grad, x, weight, 1e-5, True, True, *wanted)
    assert torch.equal(part[0], full[0])
    for mine, theirs, asked in zip(part[1:], full[1:], wanted, strict=True):
        assert torch.equal(mine, theirs) if asked else mine is None


@pytest.mark.parametrize("multiprocessors", [1, 5])
def test_rows_over_any_number_of_blocks(emulator, multiprocessors):
    emulator.device(multiprocessors)
    for case in OPS.values():
        check_rows(emulator, case, (83, 64), torch.float32)


@pytest.mark.parametrize("width", [64, 512, 2048, 8200])
def test_the_order_of_threads_does_not_matter(library, width):
    """To the last bit: a missing barrier would show."""
    emulator = Emulator(library)
    x, other = randn(2, 5, width), randn(2, 5, width, seed=1)
    weight = randn(width, seed=3)
    results = []
    for backwards in (False, True):
        emulator.device(backwards=backwards)
        results.append(
            [
                *emulator.norm_backward(other, x, weight, 1e-5, True, True, True, True),
                *emulator.sandwich(x, other, weight, weight, 1e-5, 1e-5, True),
                *emulator.sandwich_backward(x, other, other, x, weight, weight, 1e-5, 1e-5, True),
            ]
        )
    for one, another in zip(*results, strict=True):
        assert torch.equal(one, another)
