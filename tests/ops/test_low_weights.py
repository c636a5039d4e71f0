"""Linear maps through copies of their weights: values, tangents and every gradient against autograd
in fp64, and gradients that are added up where they lie."""

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from tolerances import OPS
from torch import nn

from stars_fast import functional, ops
from stars_fast.dual.tensor import Dual
from stars_fast.ops import low_weights
from stars_fast.ops.low_weights import LowWeights, refresh

HEIGHTS = (3, 5, 2)

EXACT = {"rtol": OPS[torch.float64], "atol": OPS[torch.float64]}


def parameters(heights=HEIGHTS, width=4, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(height, width, dtype=dtype)) for height in heights]
    biases = [nn.Parameter(torch.randn(h, dtype=dtype)) for h in heights] if bias else []
    return weights, biases


def copies(weights, biases, dtype=torch.float64):
    low = LowWeights(weights, biases, dtype)
    refresh([low])
    return low


@pytest.fixture(params=[False, True], ids=["after", "inside"])
def inside(request, monkeypatch):
    """Gradients added after the product, or inside of it as on CUDA: by stand-ins for torch's ops
    with `out_dtype`, which has no form for the CPU."""
    if not request.param:
        return
    mm, addmm = torch.mm, torch.addmm

    def wide_mm(a, b, *, out_dtype):
        return mm(a.to(out_dtype), b.to(out_dtype))

    def wide_addmm(total, a, b, *, out_dtype, out):
        assert total is out
        assert out.dtype == out_dtype
        return out.copy_(addmm(total, a.to(out_dtype), b.to(out_dtype)))

    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
    monkeypatch.setattr(low_weights, "adds_in_product", lambda device: True)


def reference(weights, biases, x, dual):
    """Outputs by torch's own ops; the bias moves the primal alone."""
    ys = [F.linear(x, weight) for weight in weights]
    for i, bias in enumerate(biases):
        ys[i] = ys[i] + (torch.stack((bias, 0 * bias)).view(2, 1, 1, -1) if dual else bias)
    return ys


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True], ids=["matrix", "bias"])
@pytest.mark.parametrize("dual", [False, True], ids=["plain", "dual"])
def test_all_uses_add_to_the_gradients(inside, dual, bias, together):
    """Three uses in two backward passes: the second adds to what the first left."""
    mine, other = parameters(bias=bias), parameters(bias=bias)
    low = copies(*mine)
    lead = (2, 2, 3) if dual else (2, 3)
    for _ in range(2):
        xs = [torch.randn(*lead, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        found = [y for x in xs for y in ops.low_linears(x, low, together, dual=dual)]
        expected = [y for x in xs for y in reference(*other, x, dual)]
        bars = [torch.randn_like(y) for y in expected]
        for y, z in zip(found, expected, strict=True):
            torch.testing.assert_close(y, z, **EXACT)
        x_bars = torch.autograd.grad(expected, xs, bars, retain_graph=True)
        torch.autograd.backward(expected, bars, inputs=[*other[0], *other[1]])
        torch.autograd.backward(found, bars)
        for x, x_bar in zip(xs, x_bars, strict=True):
            torch.testing.assert_close(x.grad, x_bar, **EXACT)
    for p, q in zip((*mine[0], *mine[1]), (*other[0], *other[1]), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **EXACT)


def test_what_is_not_used_adds_nothing(inside):
    weights, biases = parameters()
    low = copies(weights, biases)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    first, *_ = ops.low_linears(x, low, 2, dual=False)
    first.sum().backward()
    torch.testing.assert_close(x.grad, weights[0].sum(0).expand(6, 4), **EXACT)
    assert weights[0].grad.abs().sum() > 0
    assert all(p.grad is None or not p.grad.any() for p in (*weights[1:], *biases[1:]))


def both_ways(mine, theirs, weights, others, width, dual):
    """Hold values and every cotangent of a function of x and weights against another's."""
    torch.manual_seed(1)
    lead = (2, 2, 3) if dual else (2, 3)
    x = torch.randn(*lead, width, dtype=torch.float64)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    wraps = (Dual, Dual) if dual else (lambda x: x, lambda x: x)
    results = []
    for function, each, wrap in zip((mine, theirs), xs, wraps, strict=True):
        ys = function(wrap(each))
        ys = ys if isinstance(ys, tuple) else (ys,)
        results.append([y.stack if dual else y for y in ys])
    bars = [torch.randn_like(y) for y in results[1]]
    for ys in results:
        torch.autograd.backward(ys, bars)
    for y, z in zip(*results, strict=True):
        assert relative_error(y, z) < OPS[torch.float64]
    assert relative_error(xs[0].grad, xs[1].grad) < OPS[torch.float64]
    for p, q in zip(weights, others, strict=True):
        assert relative_error(p.grad, q.grad) < OPS[torch.float64]


@pytest.fixture(params=[1, 2], ids=["apart", "together"])
def neighbours(request, monkeypatch):
    """Two neighbours as products of their own, or as one, as on CUDA."""
    real = ops.low_linears

    def forced(x, low, together, *, dual):
        return real(x, low, request.param, dual=dual)

    monkeypatch.setattr(ops, "low_linears", forced)


@pytest.mark.parametrize("dual", [False, True], ids=["plain", "dual"])
def test_gates_through_a_copy(neighbours, dual):
    (weights, _), (others, _) = (parameters((6, 6), 4, bias=False) for _ in range(2))
    low = copies(weights, [])

    def apart(x):
        return functional.gated(*(functional.linear(x, weight) for weight in others), "silu")

    both_ways(lambda x: functional.low_gated(x, low, "silu"), apart, weights, others, 4, dual)


@pytest.mark.parametrize("dual", [False, True], ids=["plain", "dual"])
@pytest.mark.parametrize("bias", [False, True], ids=["matrix", "bias"])
def test_heads_through_a_copy(neighbours, bias, dual):
    """Four heads of queries, two of keys and values."""
    (weights, biases), (others, shifts) = (parameters((16, 8, 8), 6, bias) for _ in range(2))
    low = copies(weights, biases)
    angles = torch.randn(1, 3, 4, dtype=torch.float64)
    tables = angles.cos(), angles.sin()
    turned = tables, tables, None

    def apart(x):
        parts = zip(others, shifts or [None] * 3, turned, strict=True)
        return tuple(functional.linear_heads(x, w, b, 4, t) for w, b, t in parts)

    mine, theirs = [*weights, *biases], [*others, *shifts]
    both_ways(lambda x: functional.low_heads(x, low, 4, tables), apart, mine, theirs, 6, dual)


def test_a_part_is_the_map_alone():
    weights, biases = parameters()
    low = copies(weights, biases)
    x = torch.randn(6, 4, dtype=torch.float64)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        y = ops.low_linear(x, low.part(i), dual=False)
        torch.testing.assert_close(y, F.linear(x, weight, bias), **EXACT)
        y.sum().backward()
        assert weight.grad.shape == weight.shape
        torch.testing.assert_close(bias.grad, torch.full_like(bias, 6.0))


def test_hooks_wait_for_all_uses():
    """Those of the accumulating node, which DDP has: once a backward, with the whole gradient."""
    (weight,), _ = parameters((3,), bias=False)
    low, seen = copies([weight], []), []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *grads: seen.append(weight.grad.clone()))
    x = torch.randn(2, 4, dtype=torch.float64)
    sum(ops.low_linear(x, low, dual=False).sum() for _ in range(3)).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], 3 * x.sum(0).expand(3, 4), **EXACT)


def test_frozen_weights_get_no_gradient_and_keep_no_input():
    (weight,), _ = parameters((3,), bias=False)
    weight.requires_grad_(False)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    y = ops.low_linear(x, copies([weight], []), dual=False)
    assert y.grad_fn.saved_tensors == ()
    y.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 4), **EXACT)


def test_what_does_not_fit_is_named():
    weights, biases = parameters()
    with pytest.raises(ValueError, match=r"low_linear: x: expected \[\.\.\., 4\], got \[2, 5\]"):
        ops.low_linear(torch.ones(2, 5), copies(weights, biases), dual=False)


@pytest.mark.gpu
def test_a_gpu_adds_in_the_product():
    device = torch.device("cuda")
    assert low_weights.adds_in_product(device)
    weight = nn.Parameter(torch.randn(256, 128, device=device))
    low = copies([weight], [], torch.bfloat16)
    x = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        ops.low_linear(x, low, dual=False).sum().backward()
    expected = 3 * x.double().sum(0).expand(256, 128)
    # fp32 sums of 64 terms of size 1, three times
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_other_tensors_leave_those_of_the_weights():
    (weight, *_), (bias, *_) = parameters()
    low = copies([weight], [bias])
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    y = low_weights.low_linear(x, low, dual=False)
    (x_bar,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(x_bar, weight.sum(0).expand(2, -1))
    y.sum().backward(inputs=[bias], retain_graph=True)
    assert weight.grad is None
    assert bias.grad.tolist() == [2.0] * len(bias)
    with pytest.raises(RuntimeError, match=r"got torch\.autograd\.grad of a weight"):
        torch.autograd.grad(y.sum(), weight, retain_graph=True)
    assert weight.grad is None
    y.sum().backward()
    assert torch.equal(weight.grad, x.detach().sum(0).expand(len(weight), -1))
    assert bias.grad.tolist() == [4.0] * len(bias)
