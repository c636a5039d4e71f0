"""The Triton row and elementwise ops, interpreted, against torch.func.jvp of their references in
fp64 and autograd of that."""

import itertools

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import relative_error
from raw_ops import (
    ACTIVATIONS,
    SOFTMAX,
    check,
    gated_case,
    norm_case,
    pointwise_case,
    sandwich_case,
)
from tolerances import ONE_ROUNDING, OPS

from stars_fast.ops import reference
from stars_fast.ops.pointwise import DERIVATIVES, _pointwise_backward

pytest.importorskip("triton")

from stars_fast.ops.triton import (
    KERNELS,
    elementwise,
    launch,
    norm,
    rotary,
    sandwich,
    seed,
    softmax,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(name, *args):
    return KERNELS[name](*args)


def randn(*shape, seed=0, dtype=torch.float32):
    return oracle.randn(*shape, seed=seed, dtype=dtype, device=DEVICE)


def check_pair(case, stacks, params=()):
    """Pairs, and their primal halves alone."""
    check(run, case, stacks, params)
    check(run, case, [s[0] for s in stacks], params, dual=False)


def assert_close(got, expected):
    """A result of one op against fp64."""
    assert relative_error(got, expected) <= OPS.get(got.dtype, ONE_ROUNDING.get(got.dtype))


def check_norm(x, weight, bias, centre, eps=1e-5):
    params = [p for p in (weight, bias) if p is not None]
    check_pair(norm_case(centre, len(params), eps), [x], params)


@pytest.fixture
def large_tiles(monkeypatch):
    """The interpreter takes as long for a tile of 1,024 elements as for one of 32 times that."""
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "TILE_ELEMENTS", 2**15)


# One row, no row, several tiles and programs; widths that are and are not powers of two.
SHAPES = [(1, 3), (0, 8), (5,), (9, 33), (2, 3, 100), (35, 64), (3, 257), (2, 2048)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape, dtype):
    check_norm(randn(2, *shape, dtype=dtype), randn(shape[-1], seed=1, dtype=dtype), None, False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape):
    x, weight, bias = (randn(*s) for s in ((2, *shape), shape[-1:], shape[-1:]))
    check_norm(3 + x, weight, bias, True)


@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
def test_norm_of_width_one(centre):
    if centre:  # the result does not depend on x
        x = randn(2, 4, 1)
        assert torch.equal(norm.norm(x, None, None, 1e-5, True, True), torch.zeros_like(x))
    else:
        check_norm(randn(2, 4, 1), randn(1), None, False, eps=0.5)


def test_norm_without_parameters():
    check_norm(randn(2, 5, 33), None, None, False)
    check_norm(randn(2, 5, 33), None, None, True)


def test_norm_without_eps_ignores_the_rows_past_the_last():
    check_norm(randn(2, 5, 33), randn(33), None, False, eps=0.0)


def test_norm_of_rows_in_several_turns(monkeypatch):
    monkeypatch.setattr(norm, "LIMIT", 64)
    check_norm(randn(2, 3, 150), randn(150), None, False)
    check_norm(3 + randn(2, 3, 150), randn(150), randn(150, seed=1), True)


@pytest.mark.slow
@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("shape", [(70_000, 16), (2, 70_000)], ids=["many", "wide"])
def test_norm_of_many_and_of_wide_rows(shape, centre, large_tiles):
    check_norm(randn(2, *shape), randn(shape[-1]), None, centre)


def test_norm_with_a_wider_weight():
    check_norm(randn(2, 5, 33, dtype=torch.float16), randn(33), None, False)


def test_norm_of_a_slice_of_a_projection():
    x = randn(2, 3, 5, 99)[..., 33:66]
    assert launch.rows_of(x, True).data.data_ptr() == x.data_ptr()
    check_norm(x, randn(33), None, False)
    check_norm(x.transpose(1, 2), randn(33), None, True)
    check_norm(randn(2, 33, 5).mT, randn(33), None, False)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    width=st.integers(2, 70),
    start=st.integers(0, 3),
    pad=st.integers(0, 3),
    step=st.integers(1, 2),
    centre=st.booleans(),
)
def test_norm_of_any_rows(rows, width, start, pad, step, centre):
    x = randn(2, rows * step, start + width + pad)[:, ::step, start : start + width]
    check_norm(x, randn(width), randn(width, seed=1) if centre else None, centre)


def check_sandwich(branch, residual, weight_out, weight_in):
    normed = weight_out is not None
    weights = [weight_in, weight_out] if normed else [weight_in]
    check_pair(sandwich_case(normed), [branch, residual], weights)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "added"])
@pytest.mark.parametrize("shape", [(1, 3), (0, 8), (9, 33), (2, 5, 100), (2, 2048)], ids=str)
def test_sandwich(shape, normed, dtype):
    check_sandwich(
        randn(2, *shape, dtype=dtype),
        randn(2, *shape, seed=1, dtype=dtype),
        randn(shape[-1], seed=2) if normed else None,
        randn(shape[-1], seed=3),
    )


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "added"])
def test_sandwich_of_rows_in_several_turns(monkeypatch, normed):
    monkeypatch.setattr(sandwich, "LIMIT", 64)
    monkeypatch.setattr(sandwich, "BACKWARD_LIMIT", 64)
    weights = randn(150), randn(150, seed=1)
    check_sandwich(
        randn(2, 3, 150), randn(2, 3, 150, seed=1), weights[0] if normed else None, weights[1]
    )


def test_sandwich_of_strided_rows():
    branch, residual = randn(2, 3, 5, 66).chunk(2, -1)
    check_sandwich(branch, residual, *randn(2, 33))
    check_sandwich(branch.transpose(1, 2), residual.transpose(1, 2), *randn(2, 33))


def check_softmax(x):
    check_pair(SOFTMAX, [x])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (0, 4), (9, 33), (2, 5, 100), (2, 2048)], ids=str)
def test_softmax(shape, dtype):
    check_softmax(randn(2, *shape, dtype=dtype))


def test_softmax_of_rows_in_several_turns(monkeypatch):
    monkeypatch.setattr(softmax, "LIMIT", 64)
    check_softmax(randn(2, 3, 150))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(70_000, 3), (1, 70_000)], ids=["many", "wide"])
def test_softmax_of_many_and_of_wide_rows(shape, large_tiles):
    check_softmax(randn(2, *shape))


def test_softmax_of_strided_rows_and_large_logits():
    check_softmax(3 * randn(2, 5, 70)[..., 1:34])
    y = softmax.softmax(1e4 * randn(2, 5, 33), True)
    assert torch.isfinite(y).all()


def test_softmax_of_a_row_of_minus_infinity_is_that_of_torch():
    x = randn(3, 4)
    x[1] = -torch.inf
    x[2, 1:3] = -torch.inf
    torch.testing.assert_close(softmax.softmax(x, False), torch.softmax(x, -1), equal_nan=True)


def check_pointwise(name, x):
    check_pair(pointwise_case(name), [x])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", sorted(DERIVATIVES))
def test_pointwise(name, dtype):
    x = 2 * randn(2, 7, 33, dtype=dtype)
    if name in ("log", "sqrt", "rsqrt", "reciprocal"):
        x[0] = x[0].abs() + 0.5
    check_pointwise(name, x)


@pytest.mark.parametrize("dual", [True, False], ids=["pair", "plain"])
@pytest.mark.parametrize("name", sorted(elementwise.FUNCTIONS - set(DERIVATIVES)))
def test_backward_by_the_result(name, dual):
    """The formulas are those of plain PyTorch, one by one: a few fp32 roundings."""
    y, bar = randn(2, 7, 33).abs() + 0.1, randn(2, 7, 33, seed=1)
    y, bar = (y, bar) if dual else (y[0], bar[0])
    expected = _pointwise_backward(bar, y, name, dual)
    torch.testing.assert_close(
        elementwise.pointwise_backward(bar, y, name, dual), expected, rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 1100)], ids=str)
def test_pointwise_of_any_shape(shape):
    check_pointwise("silu", randn(2, *shape))


def test_pointwise_of_strided_rows():
    check_pointwise("gelu", randn(2, 3, 5, 70)[..., 1:34])
    check_pointwise("gelu", randn(2, 3, 5, 33).transpose(1, 3))


def test_pointwise_of_a_scalar():
    pair = randn(2, 3)[:, 0]
    assert not pair.is_contiguous()
    check_pointwise("exp", pair)


def test_nan_passes_a_relu_as_in_torch():
    x = torch.tensor([torch.nan, -1.0, 0.0, 2.0], device=DEVICE).requires_grad_()
    y = elementwise.pointwise(torch.stack((x.detach(), torch.ones_like(x))), "relu", True)
    torch.testing.assert_close(y[0], torch.relu(x).detach(), equal_nan=True)
    (slope,) = torch.autograd.grad(torch.relu(x).sum(), x)
    torch.testing.assert_close(y[1], slope)


def test_tanh_is_exact_near_zero():
    """To a few fp32 roundings of the value itself, however small: 1 - e must not cancel."""
    x = torch.logspace(-30, 1, 200, base=2.0, device=DEVICE)
    y = elementwise.pointwise(x, "tanh", False)
    torch.testing.assert_close(y, torch.tanh(x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_activations_have_limits(name):
    x = torch.tensor([-1e4, -200.0, 200.0, 1e4], device=DEVICE)
    y = elementwise.pointwise(torch.stack((x, torch.ones_like(x))), name, True)
    torch.testing.assert_close(y[0], x.clamp_min(0), atol=0, rtol=0)
    torch.testing.assert_close(y[1], (x > 0).float(), atol=0, rtol=0)


def test_unknown_functions_are_named():
    with pytest.raises(ValueError, match="got 'swish'"):
        elementwise.pointwise(randn(2, 3), "swish", True)


def check_gated(name, g, u):
    check_pair(gated_case(name), [g, u])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (0, 4), (3, 400)], ids=str)
def test_gated(shape, name, dtype):
    check_gated(name, randn(2, *shape, dtype=dtype), randn(2, *shape, seed=1, dtype=dtype))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), gap=st.integers(0, 3))
def test_gated_of_the_halves_of_a_projection(rows, width, gap):
    packed = randn(2, rows, 2 * width + gap)
    check_gated("silu", packed[..., :width], packed[..., width + gap :])


def test_gated_of_scalars():
    check_gated("silu", *randn(2, 2, 3)[..., 0].unbind(1))


def test_gated_of_rows_wider_than_a_tile():
    check_gated("silu", *randn(2, 3, 2 * 1030).chunk(2, -1))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("batch", [1, 2], ids=["shared", "own"])
@pytest.mark.parametrize(
    ("heads", "length", "width"),
    [(3, 5, 12), (1, 1, 2), (4, 33, 16), (2, 0, 8), (2, 3, 80), (1, 1, 4096)],
)
def test_rotary(heads, length, width, batch, dtype):
    fused = randn(2, 2, length, heads + 1, width, dtype=dtype)
    x = fused.transpose(2, 3)[:, :, :heads]
    cos, sin = randn(2, batch, length, width)
    wide = x.double().requires_grad_()
    expected = reference.rotary(wide, cos.double(), sin.double())
    y = rotary.rotary(x, cos, sin, False)
    assert y.transpose(2, 3).is_contiguous()
    assert_close(y, expected)
    bar = randn(*y.shape, seed=1, dtype=dtype)
    (x_bar,) = torch.autograd.grad(expected, wide, bar.double())
    assert_close(rotary.rotary(bar, cos, sin, True), x_bar)


def test_rotary_of_strided_tables():
    x = randn(1, 2, 2, 5, 8).transpose(-1, -2).contiguous().transpose(-1, -2)
    cos, sin = randn(1, 5, 16)[..., :8].expand(2, 5, 8), randn(2, 8, 5).mT
    expected = reference.rotary(x.double(), cos.double(), sin.double())
    assert_close(rotary.rotary(x, cos, sin, False), expected)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (0, 4), (9, 33), (2, 5, 100), (7,)], ids=str)
def test_row_squares(shape, dtype, monkeypatch):
    padded = randn(*shape[:-1], shape[-1] + 3, dtype=dtype)
    for x, limit in itertools.product((padded.contiguous(), padded[..., 2:-1]), (4096, 16)):
        monkeypatch.setattr(seed, "LIMIT", limit)
        wide = x.double().requires_grad_()
        sums = wide.square().sum(-1)
        got = seed.row_squares(x)
        assert got.dtype == torch.float32
        assert_close(got, sums)
        bar = randn(*shape[:-1])
        (x_bar,) = torch.autograd.grad(sums, wide, bar.double())
        assert_close(seed.row_squares_backward(bar, x), x_bar)


def field(key, rows, width):
    """The normal numbers [rows, width] of a seed."""
    stack = seed.seed_stack(
        torch.zeros(rows, width, device=DEVICE),
        torch.tensor([key], device=DEVICE),
        torch.ones(rows, device=DEVICE),
    )
    return stack[1].cpu().double()


def test_the_field_is_normal():
    z = field(2**40 + 5, 100, 400)
    count = z.numel()
    # Within five standard deviations of what standard normal numbers give.
    assert abs(z.mean()) < 5 / count**0.5
    assert abs(z.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs((z**3).mean()) < 5 * (15 / count) ** 0.5
    assert abs((z**4).mean() - 3) < 5 * (96 / count) ** 0.5
    levels = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    shares = (z.flatten() < levels[:, None]).double().mean(1)
    expected = torch.special.ndtr(levels)
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_rows_columns_and_seeds_are_uncorrelated():
    z = field(3, 160, 128)
    bound = 6 / 160**0.5
    columns = (z.T @ z / 160).fill_diagonal_(0)
    assert columns.abs().max() < bound
    rows = (z @ z.T / 128).fill_diagonal_(0)
    assert rows.abs().max() < 6 / 128**0.5
    for other in (4, 3 + 2**32, -1):
        assert abs((z * field(other, 160, 128)).mean()) < 5 / z.numel() ** 0.5
    assert torch.equal(z, field(3, 160, 128))


def test_the_field_depends_on_row_and_column_alone(monkeypatch):
    z = field(7, 12, 100)
    assert torch.equal(z[:5, :33], field(7, 5, 33))
    assert torch.equal(z[:, :1], field(7, 12, 1))
    monkeypatch.setattr(seed, "LIMIT", 32)
    assert torch.equal(z, field(7, 12, 100))


@pytest.mark.parametrize("shape", [(5, 33), (0, 8), (2, 3, 100), (4, 1)], ids=str)
def test_seed_stack_and_normal_squares_draw_the_same(shape, monkeypatch):
    h, key = randn(*shape), torch.tensor([11], device=DEVICE)
    rows = h.shape[:-1].numel()
    for limit in (4096, 64):
        monkeypatch.setattr(seed, "LIMIT", limit)
        stack = seed.seed_stack(h, key, torch.ones(shape[:-1], device=DEVICE))
        assert torch.equal(stack[0], h)
        squares = seed.normal_squares(key, rows, shape[-1])
        assert_close(squares.view(shape[:-1]), stack[1].double().square().sum(-1))


def test_seed_stack_scales_by_row_and_keeps_the_dtype():
    h, factor = randn(2, 5, 66, dtype=torch.float16)[..., ::2], randn(2, 5)
    stack = seed.seed_stack(h, torch.tensor([7], device=DEVICE), factor)
    assert stack.dtype == h.dtype
    assert torch.equal(stack[0], h)
    expected = field(7, 10, 33).view(2, 5, 33) * factor.double().cpu()[..., None]
    assert_close(stack[1].cpu(), expected)


def test_gradients_of_parameters_are_the_same_from_run_to_run():
    x, grad, weight = randn(2, 40, 64), randn(2, 40, 64, seed=1), randn(64)
    runs = [norm.norm_backward(grad, x, weight, 1e-5, True, True, True, True) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
