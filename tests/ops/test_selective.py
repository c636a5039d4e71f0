"""Results that the backward makes again instead of keeping them: the same bits, less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from stars_fast import ops
from stars_fast.ops import library
from stars_fast.ops.selective import recipe_of, recording, selective

ROWS, WIDTH, WIDE = 6, 48, 80
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer(x, weights, dual):
    """A norm, a gate and a sandwich between linear maps; every weight wants a gradient."""
    norm, into, gate, up, down, last = weights
    n = ops.rms_norm(x, norm, 1e-6, dual=dual)
    inner = ops.gated(F.linear(n, gate), F.linear(n, up), dual=dual)
    h, y = ops.sandwich(F.linear(inner, down), x, norm, into, 1e-6, 1e-6, dual=dual)
    return h + F.linear(y, last)


def arguments(dtype, device, dual):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        x = torch.randn(shape, generator=generator).to(device, dtype)
        return x.requires_grad_()

    shapes = [(WIDTH,), (WIDTH,), (WIDE, WIDTH), (WIDE, WIDTH), (WIDTH, WIDE), (WIDTH, WIDTH)]
    x = draw(2, ROWS, WIDTH) if dual else draw(ROWS, WIDTH)
    return x, [draw(*shape) for shape in shapes]


def gradients(function, x, weights, dual):
    return torch.autograd.grad(function(x, weights, dual).square().sum(), [x, *weights])


def kept(run):
    """Bytes of the storages that are saved for the backward."""
    found = {}

    def note(x):
        if recipe_of(x) is None:
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes(), x
        return x

    with saved_tensors_hooks(note, lambda x: x):
        out = run()
    del out
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("backend", ["torch", "cpp", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_the_same_to_the_last_bit(device, dtype, backend, dual):
    if backend != "torch" and not library.has(backend, device):
        pytest.skip(f"no {backend} on {device}")
    if (device, backend, dtype) == ("cpu", "triton", torch.bfloat16):
        pytest.skip("Triton's interpreter multiplies the bits of bf16")
    x, weights = arguments(dtype, device, dual)
    with ops.backend(backend):
        expected = gradients(layer, x, weights, dual)
        found = gradients(selective(layer), x, weights, dual)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(gradient.norm() > 0 for gradient in found)


@pytest.mark.parametrize("dual", [False, True])
def test_results_of_norms_and_gates_are_not_kept(dual):
    x, weights = arguments(torch.float32, "cpu", dual)
    whole = kept(lambda: layer(x, weights, dual))
    with recording():
        less = kept(lambda: layer(x, weights, dual))
    results = 4 * ROWS * (2 * WIDTH + WIDE) * (2 if dual else 1)  # n, y, inner
    assert whole - less == results


def test_a_result_is_made_once_for_all_who_ask(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "stars_fast.ops.selective.implementation",
        lambda name, *rest: calls.append(name) or library.implementation(name, *rest),
    )
    x, weights = arguments(torch.float32, "cpu", False)
    gradients(selective(layer), x, weights, False)
    assert sorted(calls) == ["gated", "norm", "norm"]


def test_a_backward_may_be_run_twice():
    x, weights = arguments(torch.float64, "cpu", True)
    loss = selective(layer)(x, weights, True).square().sum()
    first = torch.autograd.grad(loss, [x, *weights], retain_graph=True)
    second = torch.autograd.grad(loss, [x, *weights])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_result_that_was_written_to_is_kept():
    x, weights = arguments(torch.float32, "cpu", False)

    def written(x, weights, dual):
        n = ops.rms_norm(x, weights[0], 1e-6, dual=False)
        with torch.no_grad():
            n.mul_(2)
        return F.linear(n, weights[2])

    plain, again = (
        torch.autograd.grad(run(x, weights, False).square().sum(), weights[2])[0]
        for run in (written, selective(written))
    )
    assert torch.equal(plain, again)


def test_an_argument_that_was_written_to_is_an_error():
    x, weights = arguments(torch.float32, "cpu", False)

    def run(x, weights, dual):
        h = x * 1
        n = ops.rms_norm(h, weights[0], 1e-6, dual=False)
        out = F.linear(n, weights[2])
        with torch.no_grad():
            h.mul_(2)
        return out

    with pytest.raises(RuntimeError, match="norm: expected its arguments unchanged"):
        selective(run)(x, weights, False).sum().backward()


def test_of_a_chain_one_is_kept():
    """A norm of a norm is made from the first, which then has to be there."""
    x, weights = arguments(torch.float64, "cpu", False)

    def chain(x, weights, dual):
        n = ops.rms_norm(x, weights[0], 1e-6, dual=False)
        m = ops.rms_norm(n, weights[1], 1e-6, dual=False)
        return sum(F.linear(y, w) for y, w in ((n, weights[2]), (m, weights[3])))

    used = [x, *weights[:4]]
    expected, found = (
        torch.autograd.grad(run(x, weights, False).square().sum(), used)
        for run in (chain, selective(chain))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    size = 8 * ROWS * WIDTH
    with recording():
        assert kept(lambda: chain(x, weights, False)) == kept_weights(weights[:4]) + 2 * size


def kept_weights(weights):
    return sum(w.numel() * w.element_size() for w in weights)


def test_nothing_is_known_outside():
    x, weights = arguments(torch.float32, "cpu", False)
    n = ops.rms_norm(x, weights[0], 1e-6, dual=False)
    assert recipe_of(n) is None
    with recording():
        n = ops.rms_norm(x, weights[0], 1e-6, dual=False)
        assert recipe_of(n) is not None
        # Without a gradient for x a copy of it is what the op keeps.
        assert recipe_of(ops.rms_norm(x.detach(), weights[0], 1e-6, dual=False)) is None
    assert recipe_of(n) is None
