"""Trajectories of linear maps, whose every number is known."""

import math

import pytest
import torch

from stars_fast.analysis.trajectory import (
    Trajectory,
    convergence_turns,
    overflow_turns,
    states,
    trajectory,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def moved(block, h0, turns=8, **more):
    return trajectory(block, h0, turns, **more)


def test_every_number_of_a_uniform_contraction():
    h0 = torch.randn(3, 4, 5, dtype=torch.float64)
    found = moved(lambda h: 0.5 * h, h0)
    assert found.turns == 8
    powers = 0.5 ** torch.arange(9, dtype=torch.float64)[:, None]
    torch.testing.assert_close(found.norm, powers * h0.flatten(1).square().mean(1).sqrt(), **EXACT)
    torch.testing.assert_close(found.residual, torch.full_like(found.residual, 0.5), **EXACT)
    torch.testing.assert_close(found.contraction, torch.full_like(found.contraction, 0.5), **EXACT)
    torch.testing.assert_close(found.cosine, torch.ones_like(found.cosine), **EXACT)
    torch.testing.assert_close(found.to_last, (powers / 0.5**8 - 1).expand(9, 3), **EXACT)
    assert found.finite.all()


def test_the_contraction_tends_to_the_spectral_radius():
    matrix = torch.diag(torch.tensor([0.9, -0.6, 0.3, 0.1], dtype=torch.float64))
    change = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    matrix = change @ matrix @ change.T
    found = moved(lambda h: h @ matrix.T, torch.randn(2, 3, 4, dtype=torch.float64), turns=40)
    # What the second eigenvalue adds falls as (0.6 / 0.9)^38, about 2e-7.
    nine = torch.full((2,), 0.9).double()
    torch.testing.assert_close(found.contraction[-1], nine, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("factor", "cosine"), [(-0.8, -1.0), (0.8, 1.0)])
def test_the_cosine_tells_jumping_back_from_going_on(factor, cosine):
    found = moved(lambda h: factor * h, torch.randn(2, 6, dtype=torch.float64))
    torch.testing.assert_close(found.cosine, torch.full((7, 2), cosine).double(), **EXACT)


def test_a_quarter_turn_comes_back_after_four():
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    found = moved(lambda h: h @ quarter.T, torch.randn(3, 2, dtype=torch.float64))
    torch.testing.assert_close(
        found.residual, torch.full_like(found.residual, math.sqrt(2)), **EXACT
    )
    torch.testing.assert_close(found.cosine, torch.zeros_like(found.cosine), **EXACT)
    assert found.to_last[[0, 4, 8]].max() < 1e-12
    assert found.to_last[[1, 2, 3, 5, 6, 7]].min() > 1.4


def test_a_fixed_point_is_at_rest_and_its_steps_have_no_ratio():
    for h0 in (torch.randn(2, 3), torch.zeros(2, 3)):
        found = moved(lambda h: h.clone(), h0)
        assert found.residual.eq(0).all()
        assert found.contraction.isnan().all()
        assert found.cosine.isnan().all()
        assert found.to_last.eq(0).all()


def test_steps_that_are_rounding_have_no_ratio():
    found = moved(lambda h: 1 + 0.1 * (h - 1), torch.randn(2, 50), turns=20)
    assert found.contraction[:4].isfinite().all()
    torch.testing.assert_close(
        found.contraction[:4], torch.full((4, 2), 0.1).double(), rtol=0.05, atol=0
    )
    assert found.contraction[10:].isnan().all()


def mixing(h):
    """Causal: each token gets some of those before it."""
    return 0.5 * h + 0.3 * h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]


@pytest.mark.parametrize("poison", [7.0, math.nan])
def test_what_stands_on_pads_changes_nothing(poison):
    h = torch.randn(2, 5, 3, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    padded = torch.where(mask[..., None], h, poison)
    found = moved(mixing, padded, mask=mask)
    alone = [moved(mixing, h[:1]), moved(mixing, h[1:, :3])]
    expected = Trajectory.join(alone)
    for name in ("norm", "residual", "contraction", "cosine", "to_last", "finite"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **EXACT)


def test_a_token_is_measured_as_a_sample_of_its_own():
    h = torch.randn(2, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[True] * 3, [True, True, False]])
    factors = torch.tensor([0.2, -0.5, 0.9], dtype=torch.float64)
    found = moved(lambda x: x * factors[:, None], h, mask=mask, per_token=True)
    torch.testing.assert_close(found.contraction[-1, 0], factors.abs(), **EXACT)
    torch.testing.assert_close(found.norm[0, 0], h[0].square().mean(-1).sqrt(), **EXACT)
    assert found.norm[:, 1, 2].isnan().all()
    assert found.norm[:, 1, :2].isfinite().all()
    assert found.finite.all()


def test_a_sample_that_overflows_is_told_and_the_others_are_not_touched():
    factors = torch.tensor([1e13, 0.5])
    found = moved(lambda h: h * factors[:, None, None], torch.ones(2, 3, 4), turns=6)
    assert overflow_turns(found.finite) == [3, None]  # fp32 ends at 3.4e38
    assert found.norm[:3, 0].isfinite().all()
    assert found.norm[3:, 0].isnan().all()
    assert found.residual[3:, 0].isnan().all()
    torch.testing.assert_close(found.contraction[:, 1], torch.full((5,), 0.5).double(), **EXACT)


def test_convergence_is_the_first_turn_from_which_the_residual_stays_below():
    nan = math.nan
    residual = torch.tensor(
        [[0.5, 0.5, 0.001, 0.5, nan], [0.001, 0.5, 0.5, 0.001, nan], [0.001, 0.5, 0.001, nan, nan]]
    )
    assert convergence_turns(residual, 0.01) == [1, None, 2, None, None]
    assert convergence_turns(residual[:, :1], 0.6) == [0]
    with pytest.raises(ValueError, match="tol: expected a number in"):
        convergence_turns(residual, 0)


def test_the_turn_of_convergence_of_a_known_rate():
    h0 = torch.randn(2, 6, dtype=torch.float64)
    found = moved(lambda h: 1 + 0.5 * (h - 1), h0, turns=30)
    expected = []
    for row in h0:
        sizes = [
            float((0.5 * 0.5**t * (row - 1)).norm() / (1 + 0.5**t * (row - 1)).norm())
            for t in range(30)
        ]
        expected.append(max(t for t, size in enumerate(sizes) if size >= 1e-3) + 1)
    assert convergence_turns(found.residual, 1e-3) == expected


def test_states_are_visited_in_order_and_a_tuple_counts_by_its_first():
    seen = []
    h0 = torch.ones(1, 2)
    moved(
        lambda h: (h + 1, "more"), h0, turns=3, visit=lambda t, h: seen.append((t, float(h[0, 0])))
    )
    assert seen == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]
    weight = torch.ones(1, requires_grad=True)
    assert not any(h.requires_grad for h in states(lambda h: h * weight, h0, 2))


@pytest.mark.parametrize(
    ("h0", "turns", "more", "error", "message"),
    [
        (torch.ones(1, 2, dtype=torch.int64), 3, {}, TypeError, "h0: expected a floating-point"),
        (torch.ones(1, 2), 1, {}, ValueError, "turns: expected an integer >= 2, got 1"),
        (torch.ones(1, 2), 3, {"per_token": True}, ValueError, r"per_token: expected h0 \[B, S, D"),
        (torch.ones(1, 2), 3, {"mask": torch.ones(1, 2)}, ValueError, r"mask: expected shape"),
    ],
)
def test_mistakes_are_named(h0, turns, more, error, message):
    with pytest.raises(error, match=message):
        trajectory(lambda h: h, h0, turns, **more)
