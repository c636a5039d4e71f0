"""The C++ kernels of the CPU, called as raw ops, against the spec in fp64."""

import warnings
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import randn, relative_error
from raw_ops import CASES, check_rows, inputs_of, plain
from tolerances import OPS, ROTARY, TIMES_EAGER

from stars_fast.ops import extension, library, reference

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    if not extension.load():
        pytest.skip(
            "the extension is not built (pip install --no-build-isolation -e .)",
            allow_module_level=True,
        )

EPS = 1e-5


def cpp(name, *args):
    return getattr(torch.ops.stars_fast, name).cpp(*args)


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUTS = ("contiguous", "chunked", "every second row", "transposed", "expanded")


def laid_out(x, layout):
    """x with another memory layout (or, expanded, with its first row everywhere)."""
    if layout == "chunked":
        return torch.cat((x, x + 1), -1).chunk(2, -1)[0]
    if layout == "every second row" and x.dim() > 2:
        return torch.stack((x, x + 1), -2).flatten(-3, -2)[..., ::2, :]
    if layout == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if layout == "expanded" and x.dim() > 2 and x.shape[-2]:
        return x[..., :1, :].expand_as(x)
    return x


@pytest.mark.parametrize("dual", [True, False], ids=["dual", "ordinary"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_value_tangent_and_every_cotangent(name, dtype, dual):
    for shape in [(5, 33), (1, 8), (7,), (2, 3, 64), (0, 4), (2, 5000)]:
        check_rows(cpp, CASES[name], shape, DTYPES[dtype], dual)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_layout_and_parameter_dtype(data):
    case = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    # LayerNorm and softmax of one or two entries: the exact results are 0, or differences of
    # numbers that agree to the last digits.
    width = data.draw(st.integers(3, 70))
    lead = data.draw(st.lists(st.integers(0, 5), max_size=3))
    layouts = cycle(data.draw(st.lists(st.sampled_from(LAYOUTS), min_size=4, max_size=4)))
    dtype = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
    low = dtype == torch.bfloat16
    param_dtype = torch.float32 if low and data.draw(st.booleans()) else dtype
    dual = data.draw(st.booleans())
    check_rows(
        cpp,
        case,
        (*lead, width),
        dtype,
        dual,
        lambda x: laid_out(x, next(layouts)),
        param_dtype=param_dtype,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_threads_change_no_bit(name):
    case = CASES[name]
    stacks, params = inputs_of(case, (513, 131), torch.float32, True)
    outcomes = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results = case.forward(cpp, stacks, params, True)
            bars = [
                randn(2, 513, 131, seed=9 + i, dtype=torch.float32) for i, _ in enumerate(results)
            ]
            outcomes.append([*results, *case.backward(cpp, bars, results, stacks, params, True)])
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(*outcomes, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2], ids=["shared", "own"])
@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
def test_rotary(dtype, batch, layout):
    x = randn(2, 2, 3, 5, 12, dtype=DTYPES[dtype])
    if layout == "sliced":
        x = randn(2, 2, 5, 3, 3, 12, dtype=DTYPES[dtype])[:, :, :, 1].transpose(2, 3)
    angle = randn(batch, 5, 12)
    cos, sin = angle.cos().float(), angle.sin().float()
    for transpose in (False, True):
        y = cpp("rotary", x, cos, sin, transpose)
        assert y.transpose(2, 3).is_contiguous()
        exactly = plain("rotary", x.double(), cos.double(), sin.double(), transpose)
        eager = relative_error(plain("rotary", x, cos, sin, transpose), exactly)
        bound = ROTARY.get(x.dtype, TIMES_EAGER * eager)
        assert relative_error(y, exactly) <= bound
    x, bar = x.double(), randn(*x.shape, seed=3)
    turned = cpp("rotary", x, cos.double(), sin.double(), False)
    back = cpp("rotary", bar, cos.double(), sin.double(), True)
    torch.testing.assert_close((turned * bar).sum(), (x * back).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 33), (7,), (2, 3, 64), (0, 4), (3, 0)], ids=str)
def test_row_squares(dtype, shape):
    x = laid_out(randn(*shape, dtype=DTYPES[dtype]), "chunked")
    wide = torch.float64 if dtype == "fp64" else torch.float32
    out, grad = cpp("row_squares", x), randn(*shape[:-1], seed=3).to(wide)
    assert out.dtype == wide
    assert relative_error(out, x.double().square().sum(-1)) <= OPS[wide]
    bar, exactly = cpp("row_squares_backward", grad, x), 2 * x.double() * grad[..., None].double()
    assert bar.dtype == x.dtype
    eager = relative_error(plain("row_squares_backward", grad, x), exactly)
    assert relative_error(bar, exactly) <= OPS.get(x.dtype, TIMES_EAGER * eager)


def spans_and_mask(batch, queries, keys):
    first = torch.tensor([[0, 0, 1, 3, keys, 2], [1, 2, 0, 0, 0, 4]])[:batch, :queries]
    stop = torch.tensor([[1, keys, 4, 3, keys, keys], [2, keys, 1, keys, 0, 5]])[:batch, :queries]
    key = torch.arange(keys)
    seen = (key >= first[..., None]) & (key < stop[..., None])
    return torch.stack((first, stop), -1).to(torch.int32), seen.unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2], ids=["shared", "own"])
def test_attention_weights(dtype, batch):
    spans, seen = spans_and_mask(batch, 6, 7)
    s = 3 * randn(2, 2, 3, 6, 7, dtype=DTYPES[dtype])
    s[0, 1, :, 1] = -torch.inf  # seen, but masked by an added mask
    bars = randn(2, 2, 3, 6, 7, seed=3, dtype=DTYPES[dtype])
    leaf = s.double().requires_grad_()
    masked = leaf[0].masked_fill(~seen, -torch.inf)
    p, p_dot = torch.func.jvp(
        reference.attention_weights, (masked,), (leaf[1].masked_fill(~seen, 0),)
    )
    (expected,) = torch.autograd.grad((p, p_dot), leaf, tuple(bars.double()))
    # What lies outside the spans is not read.
    hidden = [x.masked_fill(~seen, torch.nan) for x in s]
    errors = {}
    for run in (cpp, plain):
        weights = [x.clone() for x in (hidden if run is cpp else s)]
        run("attention_weights", *weights, spans)
        grads = [x.masked_fill(~seen, torch.nan if run is cpp else 0) for x in bars]
        run("attention_weights_backward", *grads, *weights, spans)
        errors[run] = [
            relative_error(mine, true)
            for mine, true in zip((*weights, *grads), (p, p_dot, *expected), strict=True)
        ]
        for x in (*weights, *grads):
            assert torch.equal(x.masked_fill(seen, 0), torch.zeros_like(x))
    for mine, eager in zip(errors[cpp], errors[plain], strict=True):
        assert mine <= OPS.get(s.dtype, TIMES_EAGER * eager)


def test_softmax_of_infinities_is_that_of_torch():
    x = randn(2, 4, 9, dtype=torch.float32)
    x[0, 1] = -torch.inf
    x[0, 2, 3:] = -torch.inf
    x[0, 3, 0] = torch.nan
    y = cpp("softmax", x, True)
    torch.testing.assert_close(y[0], torch.softmax(x[0], -1), equal_nan=True)


@pytest.mark.parametrize("run", [cpp, plain], ids=["cpp", "plain"])
def test_nan_passes_a_relu_as_in_torch(run):
    x = torch.tensor([torch.nan, -1.0, 0.0, 2.0]).requires_grad_()
    y = run("pointwise", torch.stack((x.detach(), torch.ones_like(x))), "relu", True)
    torch.testing.assert_close(y[0], torch.relu(x).detach(), equal_nan=True)
    (slope,) = torch.autograd.grad(torch.relu(x).sum(), x)
    torch.testing.assert_close(y[1], slope)


@pytest.mark.parametrize("name", ["exp", "tanh", "erf"])
def test_elementary_functions_within_two_units_in_the_last_place(name):
    x = torch.cat((torch.linspace(-110, 95, 200_001), torch.linspace(-5, 5, 200_001)))
    x = torch.cat((x, x * 1e-20, torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])))
    exactly = getattr(torch, name)(x.double())
    got = cpp("pointwise", x, name, False)
    rounded = exactly.float()
    assert torch.equal(got.isnan(), rounded.isnan())
    usual = rounded.isfinite() & (rounded.abs() >= torch.finfo(torch.float32).tiny)
    unit = torch.nextafter(rounded.abs(), torch.tensor(torch.inf)) - rounded.abs()
    error = (got.double() - exactly).abs() / unit.double()
    assert error[usual].max() <= 2
    infinite = rounded.isinf()
    assert torch.equal(got[infinite], rounded[infinite])
    tiny = ~usual & rounded.isfinite()
    assert (got[tiny].double() - exactly[tiny]).abs().max() <= 2e-45


def raw_calls():
    """Every raw op with arguments."""
    x, w = randn(2, 3, 8, dtype=torch.float32), torch.ones(8)
    s, spans = randn(2, 1, 2, 6, 7, dtype=torch.float32), spans_and_mask(1, 6, 7)[0]
    table = torch.ones(1, 5, 4)
    heads = randn(2, 1, 3, 5, 4, dtype=torch.float32)
    return {
        "norm": (x, w, None, EPS, True, True),
        "norm_backward": (x, x + 1, w, EPS, False, True, True, False),
        "sandwich": (x, x + 1, w, w, EPS, EPS, True),
        "sandwich_backward": (x, x + 1, x + 2, x + 3, w, w, EPS, EPS, True),
        "pointwise": (x, "gelu", True),
        "pointwise_backward": (x, x + 1, "gelu", True),
        "gated": (x, x + 1, "silu", True),
        "gated_backward": (x, x + 1, x + 2, "silu", True),
        "softmax": (x, True),
        "softmax_backward": (x, x + 1, True),
        "rotary": (heads, table, table, False),
        "row_squares": (x,),
        "row_squares_backward": (x[..., 0], x),
        "attention_weights": (s[0], s[1], spans),
        "attention_weights_backward": (s[0].clone(), s[1].clone(), s[0] + 1, s[1] + 1, spans),
    }


def test_every_kernel_is_registered_and_tested():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {name for name in library._plain if has(f"stars_fast::{name}.cpp", "CPU")}
    assert names == set(raw_calls())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(raw_calls()))
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.stars_fast, name).cpp, raw_calls()[name])


def test_what_does_not_fit_is_an_error():
    x = randn(2, 3, 8, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="expected a parameter of 8"):
        cpp("norm", x, torch.ones(7), None, EPS, False, True)
    with pytest.raises(RuntimeError, match="shapes of operands differ"):
        cpp("gated", x, x[:, :2], "silu", True)
    with pytest.raises(RuntimeError, match="expected a stack"):
        cpp("softmax", x[:1], True)
    with pytest.raises(RuntimeError, match="unknown function swish"):
        cpp("pointwise", x, "swish", True)
    with pytest.raises(RuntimeError, match="unknown activation sin"):
        cpp("gated", x, x, "sin", True)
    with pytest.raises(RuntimeError, match="float32, bfloat16 and float64"):
        cpp("softmax", x.half(), True)
    with pytest.raises(RuntimeError, match="D even"):
        cpp("rotary", torch.ones(1, 1, 1, 2, 3), torch.ones(1, 2, 3), torch.ones(1, 2, 3), False)
    with pytest.raises(RuntimeError, match="spans"):
        cpp("attention_weights", x[None], x[None].clone(), torch.zeros(1, 4, 2, dtype=torch.int32))
