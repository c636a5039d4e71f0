"""The numbers of Jacobians that are known, and of states that are not finite."""

import math
import warnings

import pytest
import torch

from stars_fast.analysis.jacobian import Spectrum, finite_samples, spectrum
from stars_fast.analysis.trajectory import trajectory

EIGENVALUES = (0.9, -0.5, 0.4, 0.2)


def linear(dtype=torch.float64):
    """A map of tokens [.., 4] with the eigenvalues above, of a symmetric matrix."""
    q = torch.linalg.qr(torch.randn(4, 4, dtype=dtype, generator=torch.manual_seed(0)))[0]
    matrix = q @ torch.diag(torch.tensor(EIGENVALUES, dtype=dtype)) @ q.T
    return lambda h: h @ matrix.T


def test_a_linear_map_has_its_own_radius_and_frobenius_norm():
    h = torch.randn(3, 5, 4, dtype=torch.float64)
    found = spectrum(linear(), h, probes=2000, tol=1e-6)
    # A residual of tol, times the condition of the map's eigenvectors.
    torch.testing.assert_close(found.radius, torch.full((3,), 0.9).double(), rtol=1e-4, atol=0)
    squares = torch.tensor(EIGENVALUES).double() ** 2
    # 2,000 probes of at least 5 singular values err by sqrt(2 / 5 / 2000), 1.4 %.
    mean = squares.mean().expand(3)
    torch.testing.assert_close(found.mean_square, mean, rtol=0.05, atol=0)
    r4 = (5 * squares.sum()) ** 2 / (5 * squares.square().sum())
    torch.testing.assert_close(found.r4, r4.expand(3), rtol=0.1, atol=0)
    assert found.settled


def test_the_radius_is_where_the_contraction_of_the_trajectory_goes():
    h = torch.randn(2, 3, 4, dtype=torch.float64)
    contraction = trajectory(linear(), h, 40).contraction[-1]
    # The default tolerance of the radius.
    torch.testing.assert_close(spectrum(linear(), h).radius, contraction, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_samples_that_are_not_finite_get_nan_and_disturb_no_other(bad):
    h = torch.randn(3, 5, 4)
    h[1, 2, 0] = bad
    block = linear(torch.float32)
    found = spectrum(block, h, generator=torch.manual_seed(0))
    assert [x.isnan().tolist() for x in (found.radius, found.mean_square, found.r4)] == [
        [False, True, False]
    ] * 3
    torch.testing.assert_close(
        found.radius[[0, 2]], torch.full((2,), 0.9).double(), rtol=1e-3, atol=0
    )
    none = spectrum(block, torch.full_like(h, bad))
    assert none.radius.isnan().all()
    assert none.r4.isnan().all()


def test_a_jacobian_that_overflows_at_a_finite_state_gives_nan():
    factors = torch.tensor([1e30, 0.5])[:, None]
    found = spectrum(lambda h: h * factors * factors.clamp(1), torch.ones(2, 6))
    for numbers in (found.radius, found.mean_square, found.r4):
        assert numbers.isnan().tolist() == [True, False]
    assert found.radius[1] == pytest.approx(0.5, rel=1e-3)
    assert found.settled  # of the other; this one has no radius to search


def test_pads_that_are_not_finite_do_not_count():
    h = torch.randn(2, 3, 4)
    mask = torch.tensor([[True] * 3, [True, True, False]])
    h[1, 2] = math.nan
    assert finite_samples(h).tolist() == [True, False]
    assert finite_samples(h, mask).tolist() == [True, True]
    assert finite_samples(torch.tensor([[1.0, 2.0], [1.0, math.inf]])).tolist() == [True, False]


def test_an_iteration_that_does_not_settle_says_so_without_a_warning():
    q = torch.linalg.qr(torch.randn(40, 40, generator=torch.manual_seed(1)))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = spectrum(lambda h: h @ q, torch.randn(2, 40), steps=3, probes=1)
    assert not found.settled
    whole = Spectrum.join([found, spectrum(linear(torch.float32), torch.randn(1, 4), probes=1)])
    assert len(whole.radius) == 3
    assert not whole.settled


def test_other_warnings_go_through():
    def block(h):
        warnings.warn("mine", stacklevel=1)
        return 0.5 * h

    with pytest.warns(UserWarning, match="mine"):
        spectrum(block, torch.randn(1, 4), probes=1)
