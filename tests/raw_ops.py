"""Checks of a backend's raw ops against the spec in fp64: value, tangent and every cotangent.

An op is anything with the signature of its schema in `stars_fast/ops/library.py`; tensors are
[2, rows, D] with `dual`, [rows, D] without.
"""

import torch
from dual_reference import relative_error

from stars_fast.ops import reference

# Relative error in the L2 norm against fp64 on the same rounded inputs. fp32: a few roundings of
# 6e-8 an entry, and sums over a row. 16 bits: half a unit in the last place of the result (2^-9,
# 2^-12), and as much to spare.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Sums over rows are fp32 whatever the inputs are.
SUM_TOLERANCE = 1e-5

HALVES = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0))


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def bars_of(x, dual, seed):
    """Cotangents for an output like x: of both halves, and of each alone."""
    full = randn(*x.shape, seed=seed, dtype=x.dtype, device=x.device)
    if not dual:
        return [full]
    return [full * torch.tensor(halves, device=x.device).view(2, 1, 1).to(x) for halves in HALVES]


def spec(function, stacks, parameters, dual):
    """Leaves in fp64 and the outputs of `function` (stacks with `dual`) as a graph on them."""
    stacks = [s.detach().double().requires_grad_() for s in stacks]
    parameters = [None if p is None else p.detach().double().requires_grad_() for p in parameters]
    if not dual:
        out = function(*stacks, *parameters)
        outs = out if isinstance(out, tuple) else (out,)
    else:
        primal, tangent = torch.func.jvp(
            lambda *x: function(*x, *parameters),
            tuple(s[0] for s in stacks),
            tuple(s[1] for s in stacks),
        )
        single = isinstance(primal, torch.Tensor)
        pairs = [(primal, tangent)] if single else zip(primal, tangent, strict=True)
        outs = tuple(torch.stack(pair) for pair in pairs)
    return stacks, parameters, outs


def assert_close(got, expected, dual, dtype):
    """Primal and tangent halves apart."""
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert got.shape == expected.shape
    for mine, theirs in zip(got, expected, strict=True) if dual else [(got, expected)]:
        assert relative_error(mine, theirs) <= TOLERANCE[dtype]


def assert_sum_close(got, expected):
    assert got.dtype == torch.float32
    assert relative_error(got, expected) <= SUM_TOLERANCE


def norm_reference(eps, centre):
    def function(x, weight, bias):
        if centre:
            return reference.layer_norm(x, weight, bias, eps)
        return reference.rms_norm(x, weight, eps)

    return function


def check_norm(op, backward, x, weight, bias, centre, dual, eps=1e-5):
    """`bias` only with `centre`."""
    stacks, parameters, (y,) = spec(norm_reference(eps, centre), [x], [weight, bias], dual)
    assert_close(op(x, weight, bias, eps, centre, dual), y, dual, x.dtype)
    wanted = [p for p in parameters if p is not None]
    for bar in bars_of(x, dual, seed=7):
        got = backward(bar, x, weight, eps, centre, dual, weight is not None, bias is not None)
        expected = torch.autograd.grad(y, [*stacks, *wanted], bar.double(), retain_graph=True)
        assert_close(got[0], expected[0], dual, x.dtype)
        sums = [g for g in got[1:] if g is not None and (g.numel() or not x.numel())]
        for mine, theirs in zip(sums, expected[1:], strict=True):
            assert_sum_close(mine, theirs)


def check_sandwich(op, backward, branch, residual, weight_out, weight_in, dual, eps=(1e-5, 1e-6)):
    def whole(branch, residual, weight_out, weight_in):
        normed = branch
        if weight_out is not None:
            normed = reference.rms_norm(branch, weight_out, eps[0])
        return residual + normed, reference.rms_norm(residual + normed, weight_in, eps[1])

    h, x = op(branch, residual, weight_out, weight_in, *eps, dual)
    _, _, (exact_h, _) = spec(whole, [branch, residual], [weight_out, weight_in], dual)
    assert_close(h, exact_h, dual, branch.dtype)
    # From here on h is what was stored: the residual stream that gives it exactly.
    difference = h.double() - exact_h.detach()
    stacks, parameters, (exact_h, exact_x) = spec(
        whole, [branch, residual.double() + difference], [weight_out, weight_in], dual
    )
    assert_close(x, exact_x, dual, branch.dtype)
    leaves = [leaf for leaf in [*stacks, *parameters] if leaf is not None]
    bars = zip(bars_of(h, dual, seed=7), bars_of(x, dual, seed=8)[::-1], strict=True)
    for h_bar, x_bar in bars:
        got = backward(h_bar, x_bar, branch, h, weight_out, weight_in, *eps, dual)
        expected = torch.autograd.grad(
            (exact_h, exact_x), leaves, (h_bar.double(), x_bar.double()), retain_graph=True
        )
        assert_close(got[1], expected[1], dual, branch.dtype)
        assert_sum_close(got[3], expected[-1])
        if weight_out is not None:
            assert_close(got[0], expected[0], dual, branch.dtype)
            assert_sum_close(got[2], expected[2])
