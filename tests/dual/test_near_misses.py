"""What almost is a known formula runs as it is written, and `explain` claims nothing of it.

The last part breaks recognition on purpose: each near miss has a loose comparison that would take
it for the formula, and the check must fail with it.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from test_blocks import check_block, state
from torch import nn

from stars_fast import explain, fused_jvp
from stars_fast.dual.recognition import norms_and_gates, rotary
from stars_fast.dual.registry import RECORDERS, objects_named

EPS = 1e-3
SLOPE = math.sqrt(2 / math.pi)


class Block(nn.Module):
    """`f(x, weight)`, for x of shape [2, 3, 4]."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))

    def forward(self, x):
        return self.f(x, self.weight)


class Rotating(nn.Module):
    """`f(q, cos, sin)`, for q of shape [2, 2, 3, 8]."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        angles = torch.arange(24, dtype=x.dtype).view(1, 1, 3, 8)
        return self.f(q, angles.cos(), angles.sin()).transpose(1, 2).flatten(2)


def mean_square(x, dim=-1):
    return x.pow(2).mean(dim, keepdim=True)


def cdf(x, half=0.5, cubic=0.044715, slope=SLOPE, one=1.0, power=3.0):
    return half * x * (one + torch.tanh(slope * (x + cubic * torch.pow(x, power))))


def turned(q):
    a, b = q.chunk(2, -1)
    return torch.cat((-b, a), -1)


FORMULAS = {
    "RMSNorm": lambda x, w: w * x * torch.rsqrt(mean_square(x) + EPS),
    "RMSNorm, over the root": lambda x, w: w * (x / torch.sqrt(mean_square(x) + EPS)),
    "RMSNorm, by a power": lambda x, w: w * (x * (mean_square(x) + EPS).pow(-0.5)),
    "silu(g) * u": lambda x, w: F.silu(x) * (w * x).sin(),
    "x * sigmoid(x)": lambda x, w: x * torch.sigmoid(x) + w,
    "GELU, tanh form": lambda x, w: cdf(x) + w,
}

NEAR = {
    "scale of 1.01 on the root": lambda x, w: w * (x * (1.01 * torch.rsqrt(mean_square(x) + EPS))),
    "scale of 1.01 on the square": lambda x, w: w * x * torch.rsqrt(1.01 * mean_square(x) + EPS),
    "eps added twice": lambda x, w: w * x * torch.rsqrt(mean_square(x) + EPS + EPS),
    "eps outside the root": lambda x, w: w * x / (mean_square(x).sqrt() + EPS),
    "eps before the mean": lambda x, w: w * (
        x * torch.rsqrt((x.pow(2) + EPS).mean(-1, keepdim=True))
    ),
    "no eps": lambda x, w: w * x * torch.rsqrt(mean_square(x)),
    "clamp of the mean": lambda x, w: w * x * torch.rsqrt(mean_square(x).clamp(min=0.5) + EPS),
    "clamp of the input": lambda x, w: w * x * torch.rsqrt(mean_square(x.clamp(-0.5, 0.5)) + EPS),
    "clamp of the root": lambda x, w: w * (x * torch.rsqrt(mean_square(x) + EPS).clamp(max=1.0)),
    "mean over another dim": lambda x, w: w * x * torch.rsqrt(mean_square(x, -2) + EPS),
    "mean over two dims": lambda x, w: w * x * torch.rsqrt(mean_square(x, (-2, -1)) + EPS),
    "sum for mean": lambda x, w: w * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS),
    "another power": lambda x, w: w * x * torch.rsqrt(
        (x * x).pow(1.01).mean(-1, keepdim=True) + EPS
    ),
    "another root": lambda x, w: w * x * (mean_square(x) + EPS).pow(-0.505),
    "gate scaled by 1.01": lambda x, w: 1.01 * F.silu(x) * (w * x).sin(),
    "gate clamped": lambda x, w: F.silu(x).clamp(max=0.3) * (w * x).sin(),
    "sigmoid of 1.01 x": lambda x, w: x * torch.sigmoid(1.01 * x) + w,
    "sigmoid of another": lambda x, w: x * torch.sigmoid(w * x),
    "gelu, slope 0.8": lambda x, w: cdf(x, slope=0.8) + w,
    "gelu, cubic 0.0447": lambda x, w: cdf(x, cubic=0.0447) + w,
    "gelu, 0.505 x": lambda x, w: cdf(x, half=0.505) + w,
    "gelu, 1.01 + tanh": lambda x, w: cdf(x, one=1.01) + w,
    "gelu, 1.702": lambda x, w: x * torch.sigmoid(1.702 * x) + w,
}  # fmt: skip

# They hold a whole norm, which is fused, beside ops of their own.
AROUND = {
    "scale of 1.01 after": lambda x, w: 1.01 * (w * x * torch.rsqrt(mean_square(x) + EPS)),
    "scale of 1.01 before": lambda x, w: FORMULAS["RMSNorm"](1.01 * x, w),
    "clamp after": lambda x, w: FORMULAS["RMSNorm"](x, w).clamp(-1.0, 1.0),
    "clamp before": lambda x, w: FORMULAS["RMSNorm"](x.clamp(-0.5, 0.5), w),
    "weight squared": lambda x, w: FORMULAS["RMSNorm"](x, w) * w,
}

# Norms with an eps and a weight of their own: that is what is computed.
OTHERS = {
    "twice the eps": lambda x, w: w * x * torch.rsqrt(mean_square(x) + 2 * EPS),
    "1 + weight": lambda x, w: (1 + w) * (x * torch.rsqrt(mean_square(x) + EPS)),
    "1.01 weight": lambda x, w: (1.01 * w) * (x * torch.rsqrt(mean_square(x) + EPS)),
}

ROTARY_NEAR = {
    "minus": lambda q, c, s: q * c - turned(q) * s,
    "sign on the other half": lambda q, c, s: q * c
    + torch.cat((q.chunk(2, -1)[1], -q.chunk(2, -1)[0]), -1) * s,
    "no sign": lambda q, c, s: q * c + torch.cat(q.chunk(2, -1)[::-1], -1) * s,
    "halves not swapped": lambda q, c, s: q * c
    + torch.cat((-q.chunk(2, -1)[0], q.chunk(2, -1)[1]), -1) * s,
    "one half twice": lambda q, c, s: q * c
    + torch.cat((-q.chunk(2, -1)[1], q.chunk(2, -1)[1]), -1) * s,
    "another part": lambda q, c, s: q * c + torch.cat((-q[..., 3:], q[..., :3]), -1) * s,
    "sine of 1.01": lambda q, c, s: q * c + 1.01 * (turned(q) * s),
    "of another tensor": lambda q, c, s: q * c + turned(q.sin()) * s,
    "a table by heads": lambda q, c, s: q * c + turned(q) * s.expand(2, 2, 3, 8),
}  # fmt: skip


def recognised(block, width=4):
    return explain(block, state(2, 3, width)).recognised


def check_near(f):
    check_block(Block(f), state(2, 3, 4))


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_itself_is_recognised(name):
    formula = name if "silu" in name else name.split(", ov")[0].split(", by")[0]
    assert {found for _, found in recognised(Block(FORMULAS[name]))} == {formula}
    check_near(FORMULAS[name])


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_is_what_is_written(name):
    assert recognised(Block(NEAR[name])) == {}
    check_near(NEAR[name])


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_norm_stays(name):
    """The module is not called a norm; the norm in it is."""
    assert recognised(Block(AROUND[name])) == {("rms_norm", "RMSNorm"): 1}
    check_near(AROUND[name])


@pytest.mark.parametrize("name", OTHERS)
def test_another_norm_is_computed_as_itself(name):
    assert {formula for _, formula in recognised(Block(OTHERS[name]))} == {"RMSNorm"}
    check_near(OTHERS[name])


@pytest.mark.parametrize("name", ["RMSNorm, over the root", "RMSNorm, by a power"])
def test_a_weight_of_more_digits_than_its_norm_keeps_them(name):
    block = Block(FORMULAS[name])
    block.weight.data = 1 + 1e-9 * torch.arange(4, dtype=torch.float64)
    ones = torch.ones(2, 3, 4)
    out, _ = fused_jvp(block, ones, ones)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.diff(dim=-1), block(ones).diff(dim=-1))


def test_the_rotation_itself_is_recognised():
    block = Rotating(lambda q, c, s: q * c + turned(q) * s)
    assert {formula for _, formula in recognised(block, 16)} == {"rotary embedding"}


@pytest.mark.parametrize("name", ROTARY_NEAR)
def test_a_near_rotation_is_what_is_written(name):
    block = Rotating(ROTARY_NEAR[name])
    assert recognised(block, 16) == {}
    check_block(block, state(2, 3, 16))


# -- a loose comparison is noticed


def loose(number, constant):
    return number is not None and abs(number - constant) <= 1.5e-2 * abs(constant)


@pytest.mark.parametrize(
    "name",
    ["gelu, slope 0.8", "gelu, cubic 0.0447", "gelu, 0.505 x", "gelu, 1.01 + tanh", "another root"],
)
def test_constants_compared_to_a_hundredth_would_be_noticed(monkeypatch, name):
    monkeypatch.setattr(norms_and_gates, "is_constant", loose)
    assert recognised(Block(NEAR[name])) != {}
    with pytest.raises(AssertionError):
        check_near(NEAR[name])


def ignore(monkeypatch, *names, when=lambda args: True):
    """Let recognition take a call of one of `names` for its first tensor."""
    for target in {target for name in names for target in objects_named(name)}:
        before = RECORDERS.get(target)

        def ask(func, args, kwargs, before=before):
            if when(args):
                return next(each for each in args if isinstance(each, torch.Tensor))
            return before(func, args, kwargs) if before else None

        monkeypatch.setitem(RECORDERS, target, ask)


def by_almost_one(args):
    return any(type(each) is float and loose(each, 1.0) for each in args)


@pytest.mark.parametrize(
    "name", ["scale of 1.01 on the root", "scale of 1.01 on the square", "gate scaled by 1.01",
             "sigmoid of 1.01 x", "scale of 1.01 after", "1.01 weight"]
)  # fmt: skip
def test_a_scale_that_is_overlooked_would_be_noticed(monkeypatch, name):
    f = {**NEAR, **AROUND, **OTHERS}[name]
    ignore(monkeypatch, "mul", "__mul__", "__rmul__", when=by_almost_one)
    if name == "1.01 weight":  # no op of a pair: the weight itself
        right = norms_and_gates.ops.rms_norm
        monkeypatch.setattr(
            norms_and_gates.ops, "rms_norm", lambda x, w, *rest: right(x, w / 1.01, *rest)
        )
    assert recognised(Block(f)) != {}
    with pytest.raises(AssertionError):
        check_near(f)


@pytest.mark.parametrize("name", [name for name in NEAR if name.startswith("clamp")])
def test_a_clamp_that_is_overlooked_would_be_noticed(monkeypatch, name):
    ignore(monkeypatch, "clamp")
    assert recognised(Block(NEAR[name])) != {}
    with pytest.raises(AssertionError):
        check_near(NEAR[name])


@pytest.mark.parametrize("name", ["RMSNorm", "twice the eps", "1 + weight"])
@pytest.mark.parametrize("part", ["eps", "weight"])
def test_an_eps_or_weight_of_another_norm_would_be_noticed(monkeypatch, name, part):
    right = norms_and_gates.ops.rms_norm

    def other(x, weight, eps, dtype):
        return right(x, weight + 1e-8, eps, dtype) if part == "weight" else right(
            x, weight, eps * (1 + 1e-5), dtype
        )  # fmt: skip

    monkeypatch.setattr(norms_and_gates.ops, "rms_norm", other)
    with pytest.raises(AssertionError):
        check_near({**FORMULAS, **OTHERS}[name])


def test_eps_outside_the_root_would_be_noticed(monkeypatch):
    """Taken for the eps inside of it."""

    def follow(func, args, kwargs):
        step = norms_and_gates.step_of(args[0], "mean") if args else None
        called = func, args, kwargs
        return step and norms_and_gates.wait("bare root", args[0], called, value=step.value)

    def follow_sum(func, args, kwargs):
        step = norms_and_gates.step_of(args[0], "bare root")
        called = func, args, kwargs
        return step and norms_and_gates.wait(
            "sqrt", args[0], called, value=(step.value, float(args[1]))
        )

    for name, function in (("sqrt", follow), ("add", follow_sum), ("__add__", follow_sum)):
        for target in objects_named(name):
            monkeypatch.setitem(RECORDERS, target, function)
    f = lambda x, w: w * (x / (mean_square(x).sqrt() + EPS))  # noqa: E731
    assert recognised(Block(f)) != {}
    with pytest.raises(AssertionError):
        check_near(f)


def test_a_sign_or_half_that_is_overlooked_would_be_noticed(monkeypatch):
    wait = rotary.wait

    def unsigned(kind, of, called, **kwargs):
        if kind == "second half":  # as if it were minus that
            kind, kwargs = "-second half", {**kwargs, "value": of}
        return wait(kind, of, called, **kwargs)

    monkeypatch.setattr(rotary, "wait", unsigned)
    block = Rotating(ROTARY_NEAR["no sign"])
    assert recognised(block, 16) != {}
    with pytest.raises(AssertionError):
        check_block(block, state(2, 3, 16))
