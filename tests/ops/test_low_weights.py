"""Linear maps through copies of their weights: values, tangents and every gradient against autograd
in fp64, and gradients that are added up where they lie."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stars_fast import ops
from stars_fast.ops import low_weights
from stars_fast.ops.low_weights import LowWeights, refresh

HEIGHTS = (3, 5)


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


def reference(weights, biases, xs, dual):
    """Outputs by torch's own ops; the bias moves the primal alone."""
    weight = torch.cat(list(weights))
    ys = []
    for x in xs:
        y = F.linear(x, weight)
        if biases:
            bias = torch.cat(list(biases))
            y = y + (torch.stack((bias, 0 * bias)).view(2, 1, 1, -1) if dual else bias)
        ys.append(y)
    return ys


@pytest.mark.parametrize("bias", [False, True], ids=["matrix", "bias"])
@pytest.mark.parametrize("dual", [False, True], ids=["plain", "dual"])
def test_all_uses_add_to_the_gradients(inside, dual, bias):
    """Three uses in two backward passes: the second adds to what the first left."""
    mine, other = parameters(bias=bias), parameters(bias=bias)
    low = copies(*mine)
    lead = (2, 2, 3) if dual else (2, 3)
    for _ in range(2):
        xs = [torch.randn(*lead, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        bars = [torch.randn(*lead, 8, dtype=torch.float64) for _ in xs]
        found = [ops.low_linear(x, low, dual=dual) for x in xs]
        expected = reference(*other, xs, dual)
        for y, z in zip(found, expected, strict=True):
            torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
        x_bars = torch.autograd.grad(expected, xs, bars, retain_graph=True)
        torch.autograd.backward(expected, bars, inputs=[*other[0], *other[1]])
        torch.autograd.backward(found, bars)
        for x, x_bar in zip(xs, x_bars, strict=True):
            torch.testing.assert_close(x.grad, x_bar, rtol=1e-12, atol=1e-12)
    for p, q in zip((*mine[0], *mine[1]), (*other[0], *other[1]), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def test_gradients_of_one_product_lie_together_or_apart(inside):
    """Those that lie apart, as in DDP's buckets, or of which one is missing, get the same."""
    x = torch.randn(6, 4, dtype=torch.float64)
    found = []
    for start in ("none", "together", "apart", "one"):
        weights, _ = parameters(bias=False)
        low = copies(weights, [])
        sums = torch.zeros(8, 4, dtype=torch.float64)
        if start == "together":
            for weight, part in zip(weights, sums.split(HEIGHTS), strict=True):
                weight.grad = part
        elif start != "none":
            weights[0].grad = torch.zeros_like(weights[0])
        if start == "apart":
            weights[1].grad = torch.zeros_like(weights[1])
        before = [weight.grad for weight in weights]
        ops.low_linear(x, low, dual=False).square().sum().backward()
        for weight, grad in zip(weights, before, strict=True):
            assert grad is None or weight.grad is grad
        found.append(torch.cat([weight.grad for weight in weights]))
    assert all(torch.allclose(each, found[0], rtol=1e-12) for each in found)
    assert found[0].abs().sum() > 0


def test_a_part_is_the_map_alone():
    weights, biases = parameters()
    low = copies(weights, biases)
    x = torch.randn(6, 4, dtype=torch.float64)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        y = ops.low_linear(x, low.part(i), dual=False)
        torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=1e-12, atol=1e-12)
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
    torch.testing.assert_close(seen[0], 3 * x.sum(0).expand(3, 4), rtol=1e-12, atol=1e-12)


def test_frozen_weights_get_no_gradient_and_keep_no_input():
    (weight,), _ = parameters((3,), bias=False)
    weight.requires_grad_(False)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    y = ops.low_linear(x, copies([weight], []), dual=False)
    assert y.grad_fn.saved_tensors == ()
    y.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 4), rtol=1e-12, atol=1e-12)


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
