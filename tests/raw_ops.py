"""Raw ops of a backend against the spec in fp64: value, tangent and every cotangent.

`run(name, *args)` calls an op by its name in `stars_fast/ops/library.py`, with the arguments of its
schema. Tensors are [2, ..., D] with `dual`, [..., D] without.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracle import cotangents, dual_of, randn, relative_error
from tolerances import OPS, TIMES_EAGER

from stars_fast.ops import library, reference
from stars_fast.ops.pointwise import DERIVATIVES

ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu", "identity"]
POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal")


@dataclass(frozen=True)
class RawCase:
    """An op: its spec on ordinary tensors, and how its raw forward and backward are called.

    `stacks` and `params` count the inputs; forward(run, stacks, params, dual) gives a tuple of
    results, backward(run, bars, results, stacks, params, dual) the cotangents of all inputs.
    """

    spec: Callable
    forward: Callable
    backward: Callable
    stacks: int = 1
    params: int = 0
    positive: bool = False
    keeps: bool = False  # its backward reads the first result as it was stored


def norm_case(centre, params, eps=1e-5):
    """LayerNorm if `centre`, else RMSNorm, with the first `params` of weight and bias."""

    def spec(x, weight=None, bias=None):
        if centre:
            return (reference.layer_norm(x, weight, bias, eps),)
        return (reference.rms_norm(x, weight, eps),)

    def forward(run, stacks, params, dual):
        weight, bias = (*params, None, None)[:2]
        return (run("norm", stacks[0], weight, bias, eps, centre, dual),)

    def backward(run, bars, results, stacks, params, dual):
        weight = params[0] if params else None
        wanted = [len(params) > 0, len(params) > 1]
        got = run("norm_backward", bars[0], stacks[0], weight, eps, centre, dual, *wanted)
        assert all(empty(g) for g in got[1 + len(params) :])
        return got[: 1 + len(params)]

    return RawCase(spec, forward, backward, params=params)


def sandwich_case(normed, eps=1e-5):
    """Norm of a branch if `normed`, residual, and the norm of their sum."""

    def spec(branch, residual, w_in, w_out=None):
        h = residual + (reference.rms_norm(branch, w_out, eps) if normed else branch)
        return h, reference.rms_norm(h, w_in, 100 * eps)

    def forward(run, stacks, params, dual):
        w_in, w_out = (*params, None)[:2]
        return run("sandwich", *stacks, w_out, w_in, eps, 100 * eps, dual)

    def backward(run, bars, results, stacks, params, dual):
        w_in, w_out = (*params, None)[:2]
        args = *bars, stacks[0], results[0], w_out, w_in, eps, 100 * eps, dual
        branch, residual, out_bar, in_bar = run("sandwich_backward", *args)
        if normed:
            return branch, residual, in_bar, out_bar
        assert empty(branch)
        assert empty(out_bar)
        return residual, residual, in_bar

    return RawCase(spec, forward, backward, stacks=2, params=1 + normed, keeps=True)


def pointwise_case(name):
    return RawCase(
        lambda x: (reference.pointwise(x, name),),
        lambda run, stacks, params, dual: (run("pointwise", *stacks, name, dual),),
        lambda run, bars, results, stacks, params, dual: (
            run("pointwise_backward", *bars, *stacks, name, dual),
        ),
        positive=name in POSITIVE,
    )


def gated_case(name):
    return RawCase(
        lambda g, u: (reference.gated(g, u, name),),
        lambda run, stacks, params, dual: (run("gated", *stacks, name, dual),),
        lambda run, bars, results, stacks, params, dual: run(
            "gated_backward", *bars, *stacks, name, dual
        ),
        stacks=2,
    )


SOFTMAX = RawCase(
    lambda x: (reference.softmax(x),),
    lambda run, stacks, params, dual: (run("softmax", *stacks, dual),),
    lambda run, bars, results, stacks, params, dual: (
        run("softmax_backward", *bars, *results, dual),
    ),
)
CASES = {
    "rms_norm": norm_case(False, 1),
    "rms_norm-plain": norm_case(False, 0),
    "layer_norm": norm_case(True, 2),
    "layer_norm-plain": norm_case(True, 0),
    "sandwich": sandwich_case(True),
    "sandwich-prenorm": sandwich_case(False),
    "softmax": SOFTMAX,
    **{f"gated-{name}": gated_case(name) for name in ACTIVATIONS},
    **{f"pointwise-{name}": pointwise_case(name) for name in DERIVATIVES},
}


def empty(x):
    """Whether a gradient that was not asked for is none."""
    return x is None or x.shape == (0,)


def plain(name, *args):
    """The op in plain PyTorch."""
    return library._plain[name](*args)


def inputs_of(case, shape, dtype, dual, param_dtype=None, device="cpu"):
    """Stacks and parameters of a case, of rows [*shape]."""
    stack = (2, *shape) if dual else shape
    stacks = [randn(*stack, seed=i, dtype=dtype, device=device) for i in range(case.stacks)]
    if case.positive:
        stacks = [x.abs() + 0.5 for x in stacks]
    params = [1 + randn(shape[-1], seed=5 + i, device=device) / 2 for i in range(case.params)]
    return stacks, [p.to(param_dtype or dtype) for p in params]


def truth(case, stacks, params, dual):
    """Leaves in fp64, and the results of the spec as a graph on them."""
    leaves = [x.detach().double().requires_grad_() for x in (*stacks, *params)]
    stacks, params = leaves[: case.stacks], leaves[case.stacks :]
    return leaves, dual_of(case.spec, stacks, params) if dual else case.spec(*stacks, *params)


def bars_of(case, like, dual, place=lambda x: x):
    """Cotangents of the results: of both halves and of each alone, laid out by `place`."""
    shape, dtype, device = like.shape, like.dtype, like.device
    drawn = [
        cotangents(shape, 7 + i, dtype, device)
        if dual
        else [randn(*shape, seed=7 + i, dtype=dtype, device=device)]
        for i in range(1 + case.keeps)
    ]
    return [[place(bar) for bar in bars] for bars in zip(*drawn, strict=True)]


def errors(run, case, stacks, params, dual, drawn):
    """(what, relative error) of every result and cotangent, halves of stacks apart, for each of the
    `drawn` cotangents of the results."""
    dtype = stacks[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = []

    def compare(what, got, expected, stack):
        assert got.dtype == (dtype if stack else wide), what
        assert got.shape == expected.shape, what
        assert got.is_contiguous(), what
        halves = zip(got, expected, strict=True) if stack and dual else [(got, expected)]
        found.extend((what, relative_error(*half)) for half in halves)

    leaves, exact = truth(case, stacks, params, dual)
    results = case.forward(run, stacks, params, dual)
    compare("result 0", results[0], exact[0], True)
    if case.keeps:  # from here on the residual stream is one that gives what was stored
        stream = stacks[1].double() + (results[0].double() - exact[0].detach())
        leaves, exact = truth(case, [stacks[0], stream], params, dual)
        compare("result 1", results[1], exact[1], True)
    for i, bars in enumerate(drawn):
        got = case.backward(run, bars, results, stacks, params, dual)
        wanted = torch.autograd.grad(exact, leaves, [b.double() for b in bars], retain_graph=True)
        for j, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            compare(f"cotangents {i} of input {j}", mine, theirs, j < case.stacks)
    return found


def check(run, case, stacks, params, dual=True, place=lambda x: x):
    """Every error within the tolerance; in 16 bits that of plain PyTorch says what is."""
    dtype, drawn = stacks[0].dtype, bars_of(case, stacks[0], dual, place)
    mine = errors(run, case, stacks, params, dual, drawn)
    eager = mine if dtype in OPS else errors(plain, case, stacks, params, dual, drawn)
    for (what, error), (_, theirs) in zip(mine, eager, strict=True):
        # Sums over rows are in fp32.
        bound = OPS.get(dtype, max(TIMES_EAGER * theirs, OPS[torch.float32]))
        assert error <= bound, f"{what}: {error}, allowed {bound}"


def check_rows(run, case, shape, dtype, dual=True, place=lambda x: x, **given):
    """`check` on drawn inputs that `place` lays out."""
    stacks, params = inputs_of(case, shape, dtype, dual, **given)
    check(run, case, [place(x) for x in stacks], params, dual, place)
