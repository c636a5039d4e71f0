"""The row and elementwise kernels as the compiler makes them for sm_80 and sm_90, without a GPU."""

from importlib.metadata import version

import pytest
import torch
from compiled import ARCHITECTURES, SHARED_LIMIT, compiled, variants

pytestmark = pytest.mark.slow  # compiles
ROWS = 4096
CASES = {}


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def norms(width, dtype=torch.bfloat16, centre=False, dual=True):
    def launch():
        from stars_fast.ops.triton.norm import norm, norm_backward

        x, weight = empty(*(2,) * dual, ROWS, width, dtype=dtype), empty(width, dtype=dtype)
        norm(x, weight, weight if centre else None, 1e-6, centre, dual)
        norm_backward(x, x, weight, 1e-6, centre, dual, True, centre)

    return launch


def sandwiches(width, dual=True):
    def launch():
        from stars_fast.ops.triton.sandwich import sandwich, sandwich_backward

        x, weight = empty(*(2,) * dual, ROWS, width), empty(width)
        sandwich(x, x, weight, weight, 1e-6, 1e-6, dual)
        sandwich_backward(x, x, x, x, weight, weight, 1e-6, 1e-6, dual)

    return launch


def softmaxes(width):
    def launch():
        from stars_fast.ops.triton.softmax import softmax, softmax_backward

        x = empty(2, ROWS, width)
        softmax(x, True)
        softmax_backward(x, x, True)

    return launch


def gateds(width):
    def launch():
        from stars_fast.ops.triton.elementwise import gated, gated_backward

        g, u = empty(2, ROWS, 2 * width).chunk(2, -1)
        gated(g, u, "silu", True)
        gated_backward(empty(2, ROWS, width), g, u, "silu", True)

    return launch


# From one to several turns, multiples of 16 bytes and others.
LENGTHS = [*range(1, 70), 100, 127, 128, 129, *range(1000, 1040), 8192, 8193, 20000, 70001, 100000]


def attention_scores():
    """Of square matrices of every length, as in attention without a fused kernel."""
    from stars_fast.ops.triton.softmax import softmax, softmax_backward

    for length in LENGTHS:
        x = empty(2, 3, length, length)
        softmax(x, True)
        softmax_backward(x, x, True)


def sequences(width):
    """Everything else, of sequences of every length."""

    def launch():
        from stars_fast.ops.triton.elementwise import gated, gated_backward, pointwise
        from stars_fast.ops.triton.norm import norm, norm_backward
        from stars_fast.ops.triton.rotary import rotary
        from stars_fast.ops.triton.sandwich import sandwich, sandwich_backward
        from stars_fast.ops.triton.seed import row_squares, seed_stack

        weight, seed = empty(width), empty(1, dtype=torch.int64)
        for length in LENGTHS:
            x = empty(2, 3, length, width)
            norm(x, weight, None, 1e-6, False, True)
            norm_backward(x, x, weight, 1e-6, False, True, True, False)
            sandwich(x, x, weight, weight, 1e-6, 1e-6, True)
            sandwich_backward(x, x, x, x, weight, weight, 1e-6, 1e-6, True)
            pointwise(x, "silu", True)
            gated(*empty(2, 3, length, 2 * width).chunk(2, -1), "silu", True)
            gated_backward(x, x, x, "silu", True)
            rotary(
                empty(2, 3, length, 4, width).transpose(2, 3), *empty(2, 1, length, width), False
            )
            seed_stack(x[0], seed, empty(3, length))
            row_squares(x[0])

    return launch


def pointwises(name):
    def launch():
        from stars_fast.ops.triton.elementwise import pointwise, pointwise_backward

        x = empty(2, ROWS, 512)
        pointwise(x, name, True)
        pointwise_backward(x, x, name, True)

    return launch


def rotaries(width):
    def launch():
        from stars_fast.ops.triton.rotary import rotary

        x, cos = empty(2, 4, 512, 16, width).transpose(2, 3), empty(1, 512, width)
        rotary(x, cos, cos, False)

    return launch


def seeds(width):
    def launch():
        from stars_fast.ops.triton.seed import (
            normal_squares,
            row_squares,
            row_squares_backward,
            seed_stack,
        )

        seed, x, rows = empty(1, dtype=torch.int64), empty(ROWS, width), empty(ROWS)
        normal_squares(seed, ROWS, width)
        seed_stack(x, seed, rows.float())
        row_squares(x)
        row_squares_backward(rows.float(), x)

    return launch


for width in (512, 2048, 4096):
    CASES[f"norm-D{width}"] = norms(width)
    CASES[f"sandwich-D{width}"] = sandwiches(width)
CASES["norm-D128"] = norms(128)
CASES["softmax-D1024"] = softmaxes(1024)
CASES["gated-D5632"] = gateds(5632)
CASES["rotary-D128"] = rotaries(128)
CASES["seed-D2048"] = seeds(2048)
CASES["layer_norm-D2048"] = norms(2048, centre=True)
TESTED = "^(" + "|".join(CASES) + ")$"
# For the table alone.
CASES |= {
    "pointwise-gelu": pointwises("gelu"),
    "plain_norm-D2048": norms(2048, dual=False),
    "plain_sandwich-D2048": sandwiches(2048, dual=False),
    "norm-D8192": norms(8192),
    "sandwich-D8192": sandwiches(8192),
    "norm-D4096-fp32": norms(4096, torch.float32),
    "norm-D16384": norms(16384),
    "sandwich-D1024": sandwiches(1024),
    "softmax-D8192": softmaxes(8192),
    "softmax-D100000": softmaxes(100000),
    "pointwise-tanh": pointwises("tanh"),
    "pointwise-sin": pointwises("sin"),
    # Only counted.
    "lengths-scores": attention_scores,
    "lengths-512": sequences(512),
    "lengths-40": sequences(40),
}


@pytest.fixture(scope="module")
def kernels():
    return compiled("test_rows_compiled", only=TESTED)


def test_kernels_fit(kernels):
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT[kernel["arch"]], kernel
        # Where the compiler gives up on registers, it spills kilobytes.
        assert max(kernel["spill_stores"], kernel["spill_loads"]) <= 64, kernel


def test_programs_that_keep_running_fit_together(kernels):
    for kernel in kernels:
        if kernel["kernel"] == "_backward" and "norm" in kernel["case"]:
            assert kernel["registers"] <= 128, kernel


def test_each_stream_is_read_once_in_16_bytes_a_thread(kernels):
    # Two of each input; the rest are weights.
    for case, kernel, least, most in (
        ("norm-D2048", "_forward", 2, 3),
        ("sandwich-D2048", "_forward", 4, 6),
        ("softmax-D1024", "_forward", 2, 2),
        ("gated-D5632", "_gated_backward", 6, 6),
        ("rotary-D128", "_rotate", 6, 6),
    ):
        counts = [k["ldg.e.128"] for k in kernels if (k["case"], k["kernel"]) == (case, kernel)]
        assert len(counts) == len(ARCHITECTURES)
        assert all(least <= count <= most for count in counts), (case, kernel, counts)


def test_backwards_of_norms_wait_little_and_read_ahead(kernels):
    # The barriers of a whole kernel, of Triton 3.6 or 3.9, whichever makes more; 3.8 makes one more
    # of narrow rows. Of these ten add up the rows of a program, once.
    one_more = ("norm-D128", "norm-D512") if version("triton").startswith("3.8.") else ()
    for case, barriers, streams, ahead, weights in (
        ("norm-D128", 12, 4, 2, 1),
        ("norm-D512", 12, 4, 2, 1),
        ("norm-D2048", 6, 4, 2, 1),
        ("norm-D4096", 6, 4, 2, 1),
        ("layer_norm-D2048", 11, 4, 2, 1),
        ("sandwich-D512", 24, 8, 1, 2),
        ("sandwich-D2048", 10, 8, 1, 2),
        ("sandwich-D4096", 10, 8, 1, 2),
    ):
        found = [k for k in kernels if (k["case"], k["kernel"]) == (case, "_backward")]
        assert len(found) == len(ARCHITECTURES)
        for kernel in found:
            assert kernel["bar.sync"] <= barriers + (case in one_more), kernel
            # Before the loop once for each tile ahead, and once in it.
            assert kernel["ldgsts"] == streams * (1 + ahead), kernel
            assert kernel["ldg.e.128"] <= weights, kernel


def test_forwards_of_norms_wait_for_their_sums_alone(kernels):
    # One reduction is two or three barriers by Triton 3.6 and one less by later ones; none where a
    # row is of one warp. Weights, held for each row of a tile, add none.
    for case, barriers in (
        ("norm-D128", 0),
        ("norm-D512", 5),
        ("norm-D2048", 5),
        ("sandwich-D512", 11),
        ("sandwich-D2048", 11),
    ):
        found = [k for k in kernels if (k["case"], k["kernel"]) == (case, "_forward")]
        assert len(found) == len(ARCHITECTURES)
        assert max(kernel["bar.sync"] for kernel in found) <= barriers, found


def test_lengths_share_the_compiled_kernels_of_a_power_of_two():
    # 32, 64, ..., 8192 and wider, each with and without 16-byte steps, and for wide rows once more
    # for distances of more than 32 bits.
    counts = variants("test_rows_compiled", "lengths-scores")
    assert set(counts) == {"_forward", "_backward"}
    assert max(counts.values()) <= 2 * 10 + 2


def test_lengths_of_sequences_do_not_multiply_the_kernels():
    assert max(variants("test_rows_compiled", "lengths-512").values()) <= 2
    # Elementwise tiles of 128 to 1,024 elements, each for multiples of 16 and others.
    assert max(variants("test_rows_compiled", "lengths-40").values()) <= 2 * 4
