"""The CUDA C++ ops on a GPU: against the spec in fp64, and against the Triton ops."""

import pytest
import torch
from oracle import randn, relative_error
from raw_ops import check_rows, norm_case, sandwich_case
from tolerances import TWO_ROUTES

from stars_fast.ops.library import backend

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIDTHS = [1, 33, 64, 128, 512, 1000, 2048, 2880, 4096, 8192, 8200]


def op(name, backend="cuda"):
    return getattr(getattr(torch.ops.stars_fast, name), backend)


def run(name, *args):
    return op(name)(*args)


@pytest.fixture(autouse=True, scope="module")
def extension():
    try:
        with backend("cuda"):
            yield
    except RuntimeError as error:
        pytest.skip(str(error))


def stack(rows, width, dtype, dual, seed=0):
    shape = (2, rows, width) if dual else (rows, width)
    return randn(*shape, seed=seed, dtype=TYPES[dtype], device=GPU)


def weight(width, seed, dtype=torch.float32):
    return randn(width, seed=seed, dtype=dtype, device=GPU)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dual", [True, False], ids=["dual", "plain"])
@pytest.mark.parametrize("rows", [0, 1, 7, 2500])
def test_row_ops(rows, width, dtype, dual):
    eps = 0.1 if width < 3 else 1e-5
    for case in (
        norm_case(False, 1, eps), norm_case(True, 2, eps),
        sandwich_case(True, eps), sandwich_case(False, eps),
    ):  # fmt: skip
        for params in (TYPES[dtype], torch.float32):
            check_rows(run, case, (rows, width), TYPES[dtype], dual, param_dtype=params, device=GPU)


@pytest.mark.parametrize("layout", ["slice", "odd-slice", "unaligned", "transposed", "column"])
def test_layouts(layout):
    """The op on a strided tensor is the op on its copy."""
    width = 96

    def strided(seed):
        if layout == "transposed":
            return stack(40, width, "bf16", True, seed).transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "column":
            return stack(40, 2 * width, "bf16", True, seed)[..., ::2]
        if layout == "unaligned":
            return (
                stack(40, width, "bf16", True, seed)
                .flatten()[3:-width]
                .unfold(0, width, width)[:78]
                .unflatten(0, (2, 39))
            )
        room, start = (2 * width, width) if layout == "slice" else (2 * width + 1, 5)
        return stack(40, room, "bf16", True, seed)[..., start : start + width]

    x, other = strided(0), strided(1)
    w = weight(width, 3)
    calls = [
        ("norm", (x, w, w, 1e-5, True, True)),
        ("norm_backward", (other, x, w, 1e-5, True, True, True, True)),
        ("sandwich", (x, other, w, w, 1e-5, 1e-5, True)),
        ("sandwich_backward", (x, other, other, x, w, w, 1e-5, 1e-5, True)),
    ]
    for name, arguments in calls:
        got = op(name)(*arguments)
        copies = [
            a.clone(memory_format=torch.contiguous_format) if torch.is_tensor(a) else a
            for a in arguments
        ]
        expected = op(name)(*copies)
        for mine, theirs in zip(as_tuple(got), as_tuple(expected), strict=True):
            # Two results, each within its bound of the same truth.
            assert relative_error(mine, theirs) <= TWO_ROUTES[mine.dtype], name


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def test_the_same_call_gives_the_same_bits():
    x, other = stack(3000, 1024, "bf16", True), stack(3000, 1024, "bf16", True, seed=1)
    w = weight(1024, 3)
    runs = [op("sandwich_backward")(x, other, other, x, w, w, 1e-5, 1e-5, True) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [64, 2048, 4096])
def test_equal_to_triton_up_to_rounding(dtype, width):
    from stars_fast.ops.triton import KERNELS

    x, other = stack(200, width, dtype, True), stack(200, width, dtype, True, seed=1)
    w = weight(width, 3)
    calls = {
        "norm": (x, w, w, 1e-5, True, True),
        "norm_backward": (other, x, w, 1e-5, True, True, True, True),
        "sandwich": (x, other, w, w, 1e-5, 1e-5, True),
        "sandwich_backward": (x, other, other, x, w, w, 1e-5, 1e-5, True),
    }
    common = [name for name in calls if name in KERNELS]
    if not common:
        pytest.skip("no Triton op to compare with")
    for name in common:
        mine, theirs = op(name)(*calls[name]), op(name, "triton")(*calls[name])
        for a, b in zip(as_tuple(mine), as_tuple(theirs), strict=True):
            assert relative_error(a, b) <= TWO_ROUTES[TYPES[dtype]], name


def test_bad_input_is_named():
    x = stack(4, 64, "bf16", True)
    with pytest.raises(RuntimeError, match="weight: expected of shape"):
        op("norm")(x, weight(63, 3), None, 1e-5, False, True)
    with pytest.raises(RuntimeError, match="grad: expected the dtype"):
        op("norm_backward")(x.float(), x, None, 1e-5, False, True, False, False)
