"""The Triton row and elementwise ops, interpreted, against torch.func.jvp of their references in
fp64 and autograd of that."""

import itertools

import pytest
import torch
from dual_reference import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from stars_fast.ops import reference
from stars_fast.ops.pointwise import DERIVATIVES, _pointwise_backward

pytest.importorskip("triton")

from stars_fast.ops.triton import elementwise, launch, norm, rotary, sandwich, seed, softmax

# Relative error in the L2 norm: a few roundings of fp32 in each statistic, one of each result in
# fp16 (the interpreter has no bf16).
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
HALVES = {"both": (1.0, 1.0), "tangent": (0.0, 1.0), "primal": (1.0, 0.0)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# op -> output -> worst relative error of this run, for a report: `pytest -s`.
WORST: dict[tuple[str, str], float] = {}


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a kernel forgets to write holds NaN."""
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty"), (torch, "empty_like")):
        plain = getattr(owner, name)

        def filled(*args, plain=plain, **kwargs):
            x = plain(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        monkeypatch.setattr(owner, name, filled)


@pytest.fixture(autouse=True, scope="module")
def report():
    yield
    for (op, output), error in sorted(WORST.items()):
        print(f"| {op} | {output} | {error:.1e} |")


def compare(op, output, got, expected, dtype):
    """One result, a tuple of halves or one tensor, against fp64."""
    error = relative_error(got.cpu(), expected.cpu())
    assert error <= TOLERANCE[dtype], f"{op} {output}: {error}"
    key = f"{op} {str(dtype).removeprefix('torch.')}", output
    WORST[key] = max(WORST.get(key, 0.0), error)


def check(op, forward, backward, ref, stacks, plains=(), outputs=1):
    """Every output and cotangent of an op, dual and primal-only.

    `forward(*stacks, *plains, dual)` gives a tuple of outputs, `backward(bars, results, *stacks,
    *plains, dual)` the gradients of stacks and plains; `ref(*primals, *plains)` a tuple.
    """
    dtype = stacks[0].dtype
    wide = [s.double().requires_grad_() for s in stacks]
    wide_plains = [p.double().requires_grad_() for p in plains]
    leaves = wide + wide_plains
    primal, tangent = torch.func.jvp(
        lambda *x: ref(*x, *wide_plains), tuple(s[0] for s in wide), tuple(s[1] for s in wide)
    )
    results = forward(*stacks, *plains, True)
    for i, (result, y, y_dot) in enumerate(zip(results, primal, tangent, strict=True)):
        assert result.is_contiguous()
        assert result.dtype == dtype
        compare(op, f"y{i}", result[0], y, dtype)
        compare(op, f"y{i}_dot", result[1], y_dot, dtype)
    for i, (result, y) in enumerate(
        zip(forward(*(s[0] for s in stacks), *plains, False), primal, strict=True)
    ):
        compare(op, f"plain y{i}", result, y, dtype)
    for halves in HALVES.values():
        scale = torch.tensor(halves, device=DEVICE).view(2, *[1] * (results[0].dim() - 1))
        bars = [(randn(*y.shape, seed=100 + i) * scale).to(dtype) for i, y in enumerate(results)]
        got = backward(bars, results, *stacks, *plains, True)
        expected = torch.autograd.grad(
            (*primal, *tangent),
            leaves,
            (*(bar[0].double() for bar in bars), *(bar[1].double() for bar in bars)),
            retain_graph=True,
        )
        for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            if i < len(stacks):
                assert mine.is_contiguous()
                assert mine.dtype == dtype
                compare(op, f"x{i}_bar", mine[0], theirs[0], dtype)
                compare(op, f"x{i}_dot_bar", mine[1], theirs[1], dtype)
            else:
                assert mine.dtype == torch.float32
                compare(op, f"weight{i - len(stacks)}_bar", mine, theirs, dtype)
    bars = [bar[0] for bar in bars]
    got = backward(
        bars, [y[0].contiguous() for y in results], *(s[0] for s in stacks), *plains, False
    )
    expected = torch.autograd.grad(
        primal, leaves, [bar.double() for bar in bars], retain_graph=True
    )
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        of_stack = i < len(stacks)
        compare(op, f"plain x{i}_bar", mine, theirs[0] if of_stack else theirs, dtype)


def check_norm(x, weight, bias, centre, eps=1e-5):
    plains = [p for p in (weight, bias) if p is not None]

    def forward(x, *rest):
        *parameters, dual = rest
        return (norm.norm(x, *parameters, *[None] * (2 - len(parameters)), eps, centre, dual),)

    def backward(bars, results, x, *rest):
        dual = rest[-1]
        asked = [weight is not None, bias is not None]
        x_bar, *sums = norm.norm_backward(bars[0], x, weight, eps, centre, dual, *asked)
        assert all(s.shape == (x.shape[-1] if a else 0,) for s, a in zip(sums, asked, strict=True))
        return (x_bar, *(s for s, a in zip(sums, asked, strict=True) if a))

    def ref(x, w=None, b=None):
        return (reference.layer_norm(x, w, b, eps) if centre else reference.rms_norm(x, w, eps),)

    check("layer_norm" if centre else "rms_norm", forward, backward, ref, [x], plains)


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


@pytest.mark.parametrize("centre", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(("rows", "width"), [(70_000, 16), (2, 70_000)])
def test_norm_of_many_and_of_wide_rows(rows, width, centre):
    check_norm(randn(2, rows, width), randn(width), None, centre)


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
    plains = [w for w in (weight_out, weight_in) if w is not None]

    def forward(branch, residual, *rest):
        return sandwich.sandwich(branch, residual, weight_out, weight_in, 1e-5, 1e-3, rest[-1])

    def backward(bars, results, branch, residual, *rest):
        branch_bar, residual_bar, out_bar, in_bar = sandwich.sandwich_backward(
            *bars, branch, results[0], weight_out, weight_in, 1e-5, 1e-3, rest[-1]
        )
        if normed:
            return branch_bar, residual_bar, out_bar, in_bar
        assert branch_bar.shape == out_bar.shape == (0,)
        return residual_bar, residual_bar, in_bar

    def ref(branch, residual, *weights):
        if normed:
            branch = reference.rms_norm(branch, weights[0], 1e-5)
        return residual + branch, reference.rms_norm(residual + branch, weights[-1], 1e-3)

    name = "sandwich" if normed else "sandwich without weight_out"
    check(name, forward, backward, ref, [branch, residual], plains)


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
    check(
        "softmax",
        lambda x, dual: (softmax.softmax(x, dual),),
        lambda bars, results, x, dual: (softmax.softmax_backward(bars[0], results[0], dual),),
        lambda x: (reference.softmax(x),),
        [x],
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (0, 4), (9, 33), (2, 5, 100), (2, 2048)], ids=str)
def test_softmax(shape, dtype):
    check_softmax(randn(2, *shape, dtype=dtype))


def test_softmax_of_rows_in_several_turns(monkeypatch):
    monkeypatch.setattr(softmax, "LIMIT", 64)
    check_softmax(randn(2, 3, 150))


@pytest.mark.parametrize("rows", [70_000, 1])
def test_softmax_of_many_and_of_wide_rows(rows):
    check_softmax(randn(2, rows, 3 if rows > 1 else 70_000))


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
    check(
        f"pointwise {name}",
        lambda x, dual: (elementwise.pointwise(x, name, dual),),
        lambda bars, results, x, dual: (elementwise.pointwise_backward(bars[0], x, name, dual),),
        lambda x: (reference.pointwise(x, name),),
        [x],
    )


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
    check(
        f"gated {name}",
        lambda g, u, dual: (elementwise.gated(g, u, name, dual),),
        lambda bars, results, g, u, dual: elementwise.gated_backward(bars[0], g, u, name, dual),
        lambda g, u: (reference.gated(g, u, name),),
        [g, u],
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "identity"])
@pytest.mark.parametrize("shape", [(1, 1), (0, 4), (3, 400)], ids=str)
def test_gated(shape, name, dtype):
    check_gated(name, randn(2, *shape, dtype=dtype), randn(2, *shape, seed=1, dtype=dtype))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), gap=st.integers(0, 3))
def test_gated_of_the_halves_of_a_projection(rows, width, gap):
    packed = randn(2, rows, 2 * width + gap)
    check_gated("silu", packed[..., :width], packed[..., width + gap :])


def test_gated_of_rows_wider_than_a_tile():
    check_gated("silu", *randn(2, 3, 2 * 1030).chunk(2, -1))


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos.unsqueeze(-3) + turned * sin.unsqueeze(-3)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("batch", [1, 2], ids=["shared", "own"])
@pytest.mark.parametrize(
    ("heads", "length", "width"), [(3, 5, 12), (1, 1, 2), (4, 33, 16), (2, 0, 8), (2, 3, 80)]
)
def test_rotary(heads, length, width, batch, dtype):
    fused = randn(2, 2, length, heads + 1, width, dtype=dtype)
    x = fused.transpose(2, 3)[:, :, :heads]
    cos, sin = randn(2, batch, length, width)
    wide = x.double().requires_grad_()
    expected = rotated(wide, cos.double(), sin.double())
    y = rotary.rotary(x, cos, sin, False)
    assert y.transpose(2, 3).is_contiguous()
    compare("rotary", "y", y, expected, dtype)
    bar = randn(*y.shape, seed=1, dtype=dtype)
    (x_bar,) = torch.autograd.grad(expected, wide, bar.double())
    compare("rotary", "x_bar", rotary.rotary(bar, cos, sin, True), x_bar, dtype)


def test_rotary_of_strided_tables():
    x = randn(1, 2, 2, 5, 8).transpose(-1, -2).contiguous().transpose(-1, -2)
    cos, sin = randn(1, 5, 16)[..., :8].expand(2, 5, 8), randn(2, 8, 5).mT
    expected = rotated(x.double(), cos.double(), sin.double())
    compare("rotary", "y", rotary.rotary(x, cos, sin, False), expected, torch.float32)


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
        compare("row_squares", "y", got, sums, dtype)
        bar = randn(*shape[:-1])
        (x_bar,) = torch.autograd.grad(sums, wide, bar.double())
        compare("row_squares", "x_bar", seed.row_squares_backward(bar, x), x_bar, dtype)


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
        compare(
            "normal_squares", "y", squares.view(shape[:-1]),
            stack[1].double().square().sum(-1), torch.float32,
        )  # fmt: skip


def test_seed_stack_scales_by_row_and_keeps_the_dtype():
    h, factor = randn(2, 5, 66, dtype=torch.float16)[..., ::2], randn(2, 5)
    stack = seed.seed_stack(h, torch.tensor([7], device=DEVICE), factor)
    assert stack.dtype == h.dtype
    assert torch.equal(stack[0], h)
    expected = field(7, 10, 33).view(2, 5, 33) * factor.double().cpu()[..., None]
    compare("seed_stack", "v", stack[1], expected, torch.float16)


def test_gradients_of_parameters_are_the_same_from_run_to_run():
    x, grad, weight = randn(2, 40, 64), randn(2, 40, 64, seed=1), randn(64)
    runs = [norm.norm_backward(grad, x, weight, 1e-5, True, True, True, True) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
