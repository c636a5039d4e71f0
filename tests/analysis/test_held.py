"""Several products with one Jacobian: a block that draws random numbers or writes to its buffers is
held still, and left as after one forward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stars_fast import fused_jsrr, fused_jvp, spectral_radius
from stars_fast.analysis.jacobian import spectrum
from stars_fast.analysis.singular import singular_moments


def state(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


H = state(2, 3, 6)


class Block(nn.Module):
    """tanh of a linear map, then half of the entries dropped."""

    def __init__(self, drop):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6).double()
        self.drop = drop

    def forward(self, h):
        return self.drop(torch.tanh(self.linear(h)))


def fixed(mask):
    """The block with a mask fixed by hand."""
    return Block(lambda x: x * mask)


def by_bernoulli(x):
    return x * torch.empty_like(x).bernoulli_(0.5) * 2


class OwnGenerator(Block):
    def __init__(self):
        super().__init__(self.dropped)
        self.generator = torch.Generator().manual_seed(4)

    def dropped(self, x):
        keep = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) < 0.5
        return x * keep * 2


BLOCKS = {
    "dropout": lambda: Block(nn.Dropout(0.5)),
    "functional": lambda: Block(lambda x: F.dropout(x, 0.5)),
    "bernoulli": lambda: Block(by_bernoulli),
    "rand_like": lambda: Block(lambda x: x * (torch.rand_like(x).detach() < 0.5) * 2),
    "own-generator": OwnGenerator,
}


def mask_of(block, h=H):
    """The mask that a block draws from the present state."""
    return block.drop(torch.ones_like(h)).detach()


def seeded():
    return torch.Generator().manual_seed(9)


def both(found):
    return torch.cat((found.radius, found.r4))


MEASURES = {
    "krylov": lambda block: spectral_radius(block, H, generator=seeded()),
    "moments": lambda block: torch.cat(singular_moments(block, H, probes=5, generator=seeded())),
    "spectrum": lambda block: both(spectrum(block, H, generator=seeded())),
    "power-steps": lambda block: fused_jsrr(block, H, power_steps=4, generator=seeded()),
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", BLOCKS)
def test_one_mask_for_all_products(name, measure):
    torch.manual_seed(1)
    mask = mask_of(BLOCKS[name]())
    assert 0 < (mask == 0).double().mean() < 1
    expected = MEASURES[measure](fixed(mask))
    torch.manual_seed(1)
    found = MEASURES[measure](BLOCKS[name]())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_generator_is_left_as_after_one_forward(measure):
    block = BLOCKS["dropout"]()
    torch.manual_seed(1)
    block(H)
    after = torch.rand(3)
    torch.manual_seed(1)
    MEASURES[measure](block)
    assert torch.equal(torch.rand(3), after)


def test_directions_from_the_global_generator_differ():
    """The mask is repeated, not the directions: the estimate agrees with the exact figure."""
    block = Block(nn.Dropout(0.5))
    torch.manual_seed(1)
    torch.randn(H.shape, dtype=H.dtype)  # the first direction
    mask = mask_of(block)
    torch.manual_seed(1)
    found = singular_moments(block, H, probes=400)
    plain = fixed(mask)
    jacobian = torch.func.jacrev(lambda h: plain(h.view(1, 3, 6)).flatten())
    # Row by row: the mask of the second sample is another.
    for row in range(2):
        plain = fixed(mask[row : row + 1])
        exact = jacobian(H[row].flatten()).square().sum() / 18
        assert found.mean_square[row].item() == pytest.approx(exact.item(), rel=0.1)


def test_arnoldi_holds_the_mask_of_each_sample():
    pytest.importorskip("scipy")
    block = BLOCKS["dropout"]()
    torch.manual_seed(1)
    mask = mask_of(block, H[:1])
    torch.manual_seed(1)
    found = spectral_radius(block, H[:1], method="arnoldi", generator=seeded())
    expected = spectral_radius(fixed(mask), H[:1], method="arnoldi", generator=seeded())
    torch.testing.assert_close(found, expected)


def test_buffers_are_those_of_one_forward():
    """A spectral norm turns its vectors in every forward in training mode."""

    def block():
        torch.manual_seed(0)
        linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6).double())
        return nn.Sequential(linear, nn.Tanh())

    once, several = block(), block()
    weight_of = lambda b: b[0].weight.detach().clone()  # noqa: E731
    with torch.no_grad():
        weight = weight_of(once)  # reading the weight is the forward of its parametrization
    jacobian = lambda h: torch.tanh(F.linear(h, weight, once[0].bias))  # noqa: E731
    expected = spectral_radius(jacobian, H, generator=seeded())
    found = spectral_radius(several, H, generator=seeded())
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(several.buffers(), once.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_block_with_running_statistics():
    norms = [nn.InstanceNorm1d(3, track_running_stats=True).double() for _ in range(2)]
    norms[0](H)
    spectral_radius(norms[1], H)
    for mine, theirs in zip(norms[1].buffers(), norms[0].buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_gradient_through_the_power_steps_sees_one_mask():
    block = BLOCKS["dropout"]()
    options = {"power_steps": 3, "through_power_steps": True}
    torch.manual_seed(1)
    mask = mask_of(block)
    torch.manual_seed(1)
    loss = fused_jsrr(block, H, v=state(2, 3, 6, seed=4), **options)
    plain = fixed(mask)
    expected = fused_jsrr(plain, H, v=state(2, 3, 6, seed=4), **options)
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(
        torch.autograd.grad(loss, list(block.parameters())),
        torch.autograd.grad(expected, list(plain.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_an_ordinary_product_draws_anew():
    block = BLOCKS["dropout"]()
    first, second = (fused_jvp(block, H, H)[1] for _ in range(2))
    assert not torch.equal(first, second)
