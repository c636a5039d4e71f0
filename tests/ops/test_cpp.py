"""The C++ kernels of the CPU, called as raw ops, against the spec in fp64."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dual_reference import FP64, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from stars_fast.ops import extension, library, reference
from stars_fast.ops.pointwise import DERIVATIVES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    if not extension.load():
        pytest.skip(
            "the extension is not built (pip install --no-build-isolation -e .)",
            allow_module_level=True,
        )

# fp32: a few roundings of 6e-8 an entry, and sums over a row.
FP32 = 2e-6
EPS = 1e-5
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu", "identity"]


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """New tensors are full of NaN, those that the kernels make included."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def cpp(name, *args):
    return getattr(torch.ops.stars_fast, name).cpp(*args)


def plain(name, *args):
    return library._plain[name](*args)


def randn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@dataclass
class Case:
    """An op: its spec on ordinary tensors, and how its raw forward and backward are called.

    `stacks` and `params` are the inputs; forward(run, stacks, params, dual) gives a tuple of
    results, backward(run, bars, results, stacks, params, dual) the cotangents of all inputs.
    """

    spec: Any
    forward: Any
    backward: Any
    stacks: int = 1
    params: int = 0
    positive: bool = False


def _norm(centre, params):
    def spec(x, w=None, b=None):
        return reference.layer_norm(x, w, b, EPS) if centre else reference.rms_norm(x, w, EPS)

    def forward(run, stacks, params, dual):
        weight, bias = (*params, None, None)[:2]
        return (run("norm", stacks[0], weight, bias, EPS, centre, dual),)

    def backward(run, bars, results, stacks, params, dual):
        weight = params[0] if params else None
        wanted = [len(params) > 0, len(params) > 1]
        got = run("norm_backward", bars[0], stacks[0], weight, EPS, centre, dual, *wanted)
        assert [len(g) for g in got[1:]] == [stacks[0].shape[-1] * want for want in wanted]
        return got[: 1 + len(params)]

    return Case(spec, forward, backward, params=params)


def _sandwich(normed):
    def spec(branch, residual, w_in, w_out=None):
        h = residual + (reference.rms_norm(branch, w_out, EPS) if normed else branch)
        return h, reference.rms_norm(h, w_in, 2 * EPS)

    def forward(run, stacks, params, dual):
        w_in, w_out = (*params, None)[:2]
        return run("sandwich", *stacks, w_out, w_in, EPS, 2 * EPS, dual)

    def backward(run, bars, results, stacks, params, dual):
        w_in, w_out = (*params, None)[:2]
        args = *bars, stacks[0], results[0], w_out, w_in, EPS, 2 * EPS, dual
        branch, residual, out_bar, in_bar = run("sandwich_backward", *args)
        if normed:
            return branch, residual, in_bar, out_bar
        assert branch.shape == out_bar.shape == (0,)
        return residual, residual, in_bar

    return Case(spec, forward, backward, stacks=2, params=1 + normed)


def _pointwise(name):
    return Case(
        lambda x: reference.pointwise(x, name),
        lambda run, stacks, params, dual: (run("pointwise", *stacks, name, dual),),
        lambda run, bars, results, stacks, params, dual: (
            run("pointwise_backward", *bars, *stacks, name, dual),
        ),
        positive=name in ("log", "sqrt", "rsqrt", "reciprocal"),
    )


def _gated(name):
    return Case(
        lambda g, u: reference.gated(g, u, name),
        lambda run, stacks, params, dual: (run("gated", *stacks, name, dual),),
        lambda run, bars, results, stacks, params, dual: run(
            "gated_backward", *bars, *stacks, name, dual
        ),
        stacks=2,
    )


CASES = {
    "rms_norm": _norm(False, 1),
    "rms_norm-plain": _norm(False, 0),
    "layer_norm": _norm(True, 2),
    "layer_norm-plain": _norm(True, 0),
    "sandwich": _sandwich(True),
    "sandwich-prenorm": _sandwich(False),
    "softmax": Case(
        reference.softmax,
        lambda run, stacks, params, dual: (run("softmax", *stacks, dual),),
        lambda run, bars, results, stacks, params, dual: (
            run("softmax_backward", *bars, *results, dual),
        ),
    ),
    **{f"gated-{name}": _gated(name) for name in ACTIVATIONS},
    **{f"pointwise-{name}": _pointwise(name) for name in DERIVATIVES},
}
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


def exact(case, stacks, params, bars, dual):
    """Results and cotangents in fp64, a stack's halves together."""
    leaves = [x.detach().double().requires_grad_() for x in (*stacks, *params)]
    ins, plains = leaves[: case.stacks], leaves[case.stacks :]

    def spec(*inputs):
        out = case.spec(*inputs, *plains)
        return out if isinstance(out, tuple) else (out,)

    if dual:
        pair = torch.func.jvp(spec, tuple(x[0] for x in ins), tuple(x[1] for x in ins))
        results = [torch.stack(both) for both in zip(*pair, strict=True)]
    else:
        results = spec(*ins)
    return results, torch.autograd.grad(results, leaves, [bar.double() for bar in bars])


def computed(run, case, stacks, params, bars, dual):
    results = case.forward(run, stacks, params, dual)
    return results, case.backward(run, bars, results, stacks, params, dual)


def check(case, stacks, params, bars, dual):
    dtype = stacks[0].dtype
    outcome = computed(cpp, case, stacks, params, bars, dual)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for result in (*outcome[0], *outcome[1][: case.stacks]):
        assert result.dtype == dtype
        assert result.is_contiguous()
        assert result.shape == stacks[0].shape
    assert all(bar.dtype == wide for bar in outcome[1][case.stacks :])
    truth = exact(case, stacks, params, bars, dual)
    eager = computed(plain, case, stacks, params, bars, dual) if dtype == torch.bfloat16 else truth
    for ours, theirs, exactly in zip(sum_of(outcome), sum_of(eager), sum_of(truth), strict=True):
        # The halves of a stack apart; a parameter as one.
        split = dual and exactly.dim() > 1
        for mine, other, true in zip(
            ours if split else [ours],
            theirs if split else [theirs],
            exactly if split else [exactly],
            strict=True,
        ):
            if dtype == torch.bfloat16:
                # Parameter gradients are in fp32, and have its error.
                bound = max(2 * relative_error(other, true), FP32)
            else:
                bound = FP64 if dtype == torch.float64 else FP32
            assert relative_error(mine, true) <= bound


def sum_of(outcome):
    return [*outcome[0], *outcome[1]]


def inputs_of(case, shape, dtype, dual, layouts=("contiguous",), param_dtype=None):
    stack = (2, *shape) if dual else shape

    def placed(x, i):
        return laid_out(x, layouts[i % len(layouts)])

    stacks = [randn(*stack, seed=i, dtype=dtype) for i in range(case.stacks)]
    if case.positive:
        stacks = [x.abs() + 0.5 for x in stacks]
    params = [1 + randn(shape[-1], seed=5 + i) / 2 for i in range(case.params)]
    bars = len(case.forward(plain, stacks, params, dual))
    return (
        [placed(x, i) for i, x in enumerate(stacks)],
        [p.to(param_dtype or dtype) for p in params],
        [placed(randn(*stack, seed=9 + i, dtype=dtype), i + 2) for i in range(bars)],
    )


@pytest.mark.parametrize("dual", [True, False], ids=["dual", "ordinary"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_value_tangent_and_every_cotangent(name, dtype, dual):
    case = CASES[name]
    for shape in [(5, 33), (1, 8), (7,), (2, 3, 64), (0, 4), (2, 5000)]:
        check(case, *inputs_of(case, shape, DTYPES[dtype], dual), dual)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_layout_and_parameter_dtype(data):
    case = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    # LayerNorm and softmax of one or two entries: the exact results are 0, or differences of
    # numbers that agree to the last digits.
    width = data.draw(st.integers(3, 70))
    lead = data.draw(st.lists(st.integers(0, 5), max_size=3))
    layouts = data.draw(st.lists(st.sampled_from(LAYOUTS), min_size=4, max_size=4))
    dtype = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
    low = dtype == torch.bfloat16
    param_dtype = torch.float32 if low and data.draw(st.booleans()) else dtype
    dual = data.draw(st.booleans())
    check(case, *inputs_of(case, (*lead, width), dtype, dual, layouts, param_dtype), dual)


@pytest.mark.parametrize("name", CASES)
def test_threads_change_no_bit(name):
    case = CASES[name]
    outcomes = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            inputs = inputs_of(case, (513, 131), torch.float32, True)
            outcomes.append(sum_of(computed(cpp, case, *inputs, True)))
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
        bound = {"fp64": 1e-14, "fp32": 1e-7}.get(dtype)
        if bound is None:
            bound = 2 * relative_error(plain("rotary", x, cos, sin, transpose), exactly)
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
    bound = {"fp64": FP64, "fp32": FP32}.get(dtype)
    assert relative_error(out, x.double().square().sum(-1)) <= (bound or FP32)
    bar, exactly = cpp("row_squares_backward", grad, x), 2 * x.double() * grad[..., None].double()
    assert bar.dtype == x.dtype
    if bound is None:
        bound = 2 * relative_error(plain("row_squares_backward", grad, x), exactly)
    assert relative_error(bar, exactly) <= bound


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
    bound = {"fp64": FP64, "fp32": FP32}.get(dtype)
    for mine, other in zip(errors[cpp], errors[plain], strict=True):
        assert mine <= (2 * other if bound is None else bound)


def test_softmax_of_infinities_is_that_of_torch():
    x = randn(2, 4, 9, dtype=torch.float32)
    x[0, 1] = -torch.inf
    x[0, 2, 3:] = -torch.inf
    x[0, 3, 0] = torch.nan
    y = cpp("softmax", x, True)
    torch.testing.assert_close(y[0], torch.softmax(x[0], -1), equal_nan=True)


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
