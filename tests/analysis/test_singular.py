"""Moments of singular values against the singular values themselves."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stars_fast.analysis.singular import singular_moments


class Mixing(nn.Module):
    """A block of [B, S, D] whose rows do not meet."""

    def __init__(self, d=6):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(d, 9).double(), nn.Linear(9, d).double()

    def forward(self, h):
        return h + self.b(torch.tanh(self.a(h))) + 0.5 * h.mean(1, keepdim=True)


def exact(block, h, keep):
    """From the whole Jacobian of one sample [S, D], on its real tokens."""
    size = h.numel()
    jacobian = torch.func.jacrev(lambda x: block(x[None])[0])(h).reshape(size, size)
    kept = keep[:, None].expand_as(h).reshape(-1)
    s = torch.linalg.svdvals(jacobian[kept][:, kept])
    return (s.square().mean(), s.square().sum() ** 2 / s.pow(4).sum())


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_the_moments_are_those_of_the_singular_values(masked):
    block, h = Mixing(), torch.randn(3, 5, 6, dtype=torch.float64)
    mask = torch.ones(3, 5, dtype=torch.bool)
    if masked:
        mask[1, 3:] = mask[2, :4] = False
    generator = torch.Generator().manual_seed(1)
    found = singular_moments(
        block, h, mask=mask if masked else None, probes=4000, generator=generator
    )
    # 4,000 probes err by sqrt(2 / r4 / 4000), about 1 %; the fourth powers by some more.
    for i in range(3):
        mean_square, r4 = exact(block, h[i].clone(), mask[i])
        torch.testing.assert_close(found.mean_square[i], mean_square, rtol=0.02, atol=0)
        torch.testing.assert_close(found.r4[i], r4, rtol=0.05, atol=0)


def test_a_rotation_has_all_its_singular_values_and_a_projection_one():
    q, _ = torch.linalg.qr(torch.randn(8, 8))
    # 200 probes of 8 singular values err by sqrt(2 / 8 / 200) = 4 %.
    ones = singular_moments(lambda h: h @ q, torch.randn(2, 8), probes=200)
    torch.testing.assert_close(ones.mean_square, torch.ones(2), rtol=0.1, atol=0)
    torch.testing.assert_close(ones.r4, torch.full((2,), 8.0), rtol=0.1, atol=0)
    line = F.normalize(torch.randn(8), dim=0)
    single = singular_moments(lambda h: (h @ line)[:, None] * line, torch.randn(2, 8), probes=200)
    assert single.r4.max() < 1.4
    assert single.r4.min() > 0.7


def test_one_direction_errs_no_more_than_r4_says():
    """The relative variance of one estimate of the penalty is at most 2 / r4."""
    block, h = Mixing(), torch.randn(1, 5, 6, dtype=torch.float64)
    _, r4 = exact(block, h[0].clone(), torch.ones(5, dtype=torch.bool))
    generator = torch.Generator().manual_seed(2)
    singles = [
        singular_moments(block, h, probes=1, generator=generator).mean_square.item()
        for _ in range(2000)
    ]
    singles = torch.tensor(singles)
    relative = (singles.var() / singles.mean() ** 2).item()
    assert 0.5 * 2 / r4 < relative < 1.2 * 2 / r4


def test_samples_without_real_tokens_and_vanishing_jacobians_give_zero():
    h = torch.randn(2, 3, 4)
    mask = torch.tensor([[True] * 3, [False] * 3])
    found = singular_moments(lambda h: 2 * h, h, mask=mask, probes=8)
    assert found.mean_square[1] == found.r4[1] == 0
    assert found.mean_square[0] > 1
    flat = singular_moments(lambda h: 0 * h, h, probes=2)
    assert flat.r4.eq(0).all()


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="h: expected a floating-point tensor"):
        singular_moments(lambda h: h, torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="probes: expected at least 1, got 0"):
        singular_moments(lambda h: h, torch.ones(2, 3), probes=0)
