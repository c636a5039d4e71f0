"""The last linear map of a block, of which `fused_jsrr` takes the tangent alone: exact where that
is done, and not done where someone might see it."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import relative_error
from tolerances import BLOCK
from torch import nn
from torch.utils.checkpoint import checkpoint

from stars_fast import fused_jsrr, recognition
from stars_fast.dual.dual_pass import first_output
from stars_fast.dual.registry import observe
from stars_fast.ops.tangent_linear import tangent_linear

WIDTH = 6
WEIGHT = torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).reshape(WIDTH, WIDTH)


class Body(nn.Module):
    """A block that ends with a linear map; subclasses end otherwise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(WIDTH, 2 * WIDTH)
        self.first, self.second = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH, False)
        self.kept = []
        self.double()

    def inner(self, h):
        return torch.tanh(self.into(h))

    def forward(self, h):
        return h + self.first(self.inner(h))


def ending(forward):
    """A block whose forward is this function."""
    return type(forward.__name__, (Body,), {"forward": forward})()


def with_gradients(loss, block):
    """The loss and the gradients of the weights, zeros where there are none."""
    weights = list(block.parameters())
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return [
        loss,
        *(torch.zeros_like(p) if g is None else g for p, g in zip(weights, grads, strict=True)),
    ]


def direction(h):
    v = torch.ones_like(h).cumsum(-1)
    return v / v.square().mean((1, 2), keepdim=True).sqrt()


def assert_exact(block, h, plain=None):
    """By torch.func.jvp and autograd, of `plain` where they can't do the block itself."""
    got = with_gradients(fused_jsrr(block, h, v=direction(h)), block)
    plain = plain or block
    jv = torch.func.jvp(lambda x: first_output(plain(x)), (h,), (direction(h),))[1]
    expected = with_gradients(jv.square().mean(), plain)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= BLOCK


@pytest.fixture
def h():
    return torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def the_map_alone(self, h):
    return self.first(self.inner(h))


def the_map_before_the_state(self, h):
    return self.second(self.inner(h)) + h


def two_maps(self, h):
    x = self.inner(h)
    return torch.add(h, self.first(x) + self.second(x))


def several_outputs(self, h):
    x = self.inner(h)
    return {"state": h + self.first(x), "keys": x, "other": self.second(x)}


def layers_before(self, h):
    h = h + self.second(self.inner(h))
    return F.dropout(h + self.first(self.inner(h)), 0.5, training=False)


LAZY = [Body.forward, the_map_alone, the_map_before_the_state, two_maps, several_outputs]


@pytest.mark.parametrize("forward", [*LAZY, layers_before])
def test_the_tangent_alone_is_exact(forward, h, taken):
    block = ending(forward)
    assert_exact(block, h)
    assert len(taken) == (2 if forward is two_maps else 1)
    found = fused_jsrr(block, h, v=direction(h))
    with torch.no_grad():
        assert torch.equal(fused_jsrr(block, h, v=direction(h)), found)


def test_a_bias_that_moves_nothing_has_a_gradient_of_zeros(h, taken):
    block = Body()
    fused_jsrr(block, h).backward()
    assert taken
    assert torch.equal(block.first.bias.grad, torch.zeros(WIDTH, dtype=torch.float64))


def test_a_gradient_of_the_gradient(h, taken):
    stack = torch.stack((h, direction(h))).requires_grad_()
    weight = Body().first.weight[:, :WIDTH].detach().clone().requires_grad_()
    assert torch.autograd.gradgradcheck(tangent_linear, (stack, weight))


# -- what shows the primal


def a_norm(self, h):
    return F.rms_norm(h + self.first(self.inner(h)), (WIDTH,))


def written_in_place(self, h):
    return (h + self.first(self.inner(h))).mul_(2)


def a_view(self, h):
    return (h + self.first(self.inner(h))).view(-1, WIDTH).view(h.shape)


def a_constant_beside(self, h):
    return self.first(self.inner(h)) + self.first.bias


def under_checkpoint(self, h):
    return checkpoint(lambda x: x + self.first(self.inner(x)), h, use_reentrant=False)


@pytest.mark.parametrize(
    "forward", [a_norm, written_in_place, a_view, a_constant_beside, under_checkpoint]
)
def test_elsewhere_the_map_is_that_of_a_pair(forward, h, taken):
    assert_exact(ending(forward), h, plain=Body() if forward is under_checkpoint else None)
    assert not taken


def written_norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    "end",
    [
        written_norm,
        F.silu,
        lambda x: x * torch.sigmoid(x),
        lambda x: x * x,
        lambda x: written_norm(x) + F.linear(x.cos(), WEIGHT),
    ],
)
@pytest.mark.parametrize("tangent_alone", [True, False])
def test_what_waits_at_the_end_runs_once(end, tangent_alone, h):
    """And what is a sum with a map that waits leaves the map the tangent alone."""
    ran = []
    stop = observe(lambda name, kind: ran.append((name, kind)))
    try:
        fused_jsrr(lambda x: end(x.sin()), h, return_output=not tangent_alone)
    finally:
        stop()
    assert len(ran) == len(set(ran))
    assert (("linear", "stacked") in ran) <= (not tangent_alone)
    block = Body()
    block.forward = lambda x: end(x + block.second(block.inner(x)))
    assert_exact(block, h)


def test_what_is_kept_of_a_pass_has_its_values(h, taken):
    """By hooks, on the module, and read when the weights have changed."""
    block = Body()
    plain = [block.first(block.inner(h)), block(h)]
    for module in (block.first, block):
        module.register_forward_hook(lambda module, args, out: block.kept.append(out))
    loss = fused_jsrr(block, h, v=direction(h))
    assert not taken
    with torch.no_grad():
        for p in block.parameters():
            p.add_(1.0)
    for got, value in zip(block.kept, plain, strict=True):
        assert relative_error(got + 0.0, value) <= BLOCK
    assert relative_error(loss, fused_jsrr(Body(), h, v=direction(h))) <= BLOCK


def test_a_hook_that_replaces_the_output(h, taken):
    block = Body()
    block.register_forward_hook(lambda module, args, out: out * out.sigmoid())
    assert_exact(block, h)
    assert not taken


def test_weights_that_move_when_their_module_is_left(h, taken):
    """As offload does it: `.data` is another tensor until the next forward."""
    block, at_home = Body(), Body()

    def bring(module, args):
        module.weight.data = at_home.first.weight.data.clone()

    def send(module, args, out):
        module.weight.data = torch.full_like(module.weight.data, torch.nan)

    block.first.register_forward_pre_hook(bring)
    block.first.register_forward_hook(send)
    loss = fused_jsrr(block, h, v=direction(h))
    assert not taken
    assert relative_error(loss, fused_jsrr(at_home, h, v=direction(h))) <= BLOCK


def test_a_weight_that_is_written_before_the_pass_ends_is_an_error(h):
    """Unless the pass sees the write, and lets the map run first."""

    def forward(self, h):
        out = h + self.first(self.inner(h))
        with torch._C.DisableTorchFunction():
            self.first.weight.detach().add_(1.0)
        return out

    with pytest.raises(RuntimeError, match="was written in place"):
        fused_jsrr(ending(forward), h)


def test_a_checkpoint_around_the_pass_does_the_same(h, taken):
    block = Body()
    plain = with_gradients(fused_jsrr(block, h, v=direction(h)), block)
    around = checkpoint(lambda x: fused_jsrr(block, x, v=direction(x)), h, use_reentrant=False)
    for a, b in zip(with_gradients(around, block), plain, strict=True):
        assert torch.equal(a, b)
    assert len(taken) == 3  # the recomputation does it too


@pytest.mark.parametrize("how", ["recognition", "autocast", "group", "output"])
def test_where_it_is_not_done(how, h, taken, monkeypatch):
    block = Body()
    if how == "group":
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with recognition(how != "recognition"), torch.autocast("cpu", enabled=how == "autocast"):
        fused_jsrr(block, h, return_output=how == "output")
    assert not taken
