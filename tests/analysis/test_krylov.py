"""Radii of matrices whose eigenvalues are known, where power iteration has trouble."""

import math
import weakref

import pytest
import torch

from stars_fast import spectral_radius
from stars_fast.analysis import krylov
from stars_fast.analysis.krylov import krylov_radius


def many(*matrices):
    stacked = torch.stack(matrices)
    return lambda v: torch.einsum("bij,bj->bi", stacked, v)


def start(count, width, dtype=torch.float64):
    return torch.randn(count, width, dtype=dtype, generator=torch.manual_seed(0))


def similar(eigenvalues, seed):
    """A matrix with these eigenvalues that is not normal."""
    generator = torch.manual_seed(seed)
    n = len(eigenvalues)
    change = torch.randn(n, n, dtype=torch.float64, generator=generator)
    return change @ torch.diag(torch.as_tensor(eigenvalues).double()) @ torch.linalg.inv(change)


def test_eigenvalues_of_nearly_one_modulus_are_told_apart():
    close = similar([0.9, -0.8995, 0.899, *torch.linspace(-0.5, 0.5, 27).tolist()], 0)
    found = krylov_radius(many(close), start(1, 30), steps=30, tol=1e-6)
    assert found.settled.all()
    # Here and below: ten to a hundred times tol, as the residual is not quite the error.
    torch.testing.assert_close(found.radius, torch.tensor([0.9]).double(), rtol=1e-5, atol=0)


def test_each_sample_has_its_own_radius():
    radii = [0.2, 1.5, 0.7]
    samples = [similar([r, *(r * torch.linspace(-0.6, 0.6, 9)).tolist()], k)
               for k, r in enumerate(radii)]  # fmt: skip
    found = krylov_radius(many(*samples), start(3, 10), tol=1e-8)
    torch.testing.assert_close(found.radius, torch.tensor(radii).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("angle", [0.0, 1.0])
def test_it_begins_anew_until_it_settles(monkeypatch, angle):
    monkeypatch.setattr(krylov, "VECTORS", 6)
    calls = []
    c, s = math.cos(angle), math.sin(angle)
    turn = torch.tensor([[c, -s], [s, c]])
    matrix = torch.block_diag(turn.double(), torch.diag(torch.linspace(0.1, 0.85, 38).double()))

    def apply(v):
        calls.append(v)
        return v @ matrix.T

    alive = weakref.WeakSet()

    class Watched(krylov._Space):
        def __init__(self, *arguments):
            assert not alive  # the last one is let go before
            super().__init__(*arguments)
            alive.add(self)

    monkeypatch.setattr(krylov, "_Space", Watched)
    found = krylov_radius(apply, start(2, 40), steps=200, tol=1e-5)
    assert 6 < len(calls) < 200
    assert found.settled.all()
    torch.testing.assert_close(found.radius, torch.ones(2).double(), rtol=1e-4, atol=0)
    few = krylov_radius(apply, start(2, 40), steps=7, tol=1e-5)
    assert not few.settled.any()


def test_exhausted_spaces_give_exact_radii():
    matrix = similar([0.5, -0.4, 0.1], 3)
    found = krylov_radius(many(matrix, 0 * matrix), start(2, 3))
    torch.testing.assert_close(found.radius, torch.tensor([0.5, 0]).double(), rtol=1e-9, atol=0)
    nothing = krylov_radius(many(matrix), torch.zeros(1, 3, dtype=torch.float64))
    assert nothing.radius.tolist() == [0]
    assert nothing.settled.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_eigenvalues_of_an_orthogonal_map_have_modulus_one(dtype):
    q = torch.linalg.qr(torch.randn(40, 40, dtype=dtype, generator=torch.manual_seed(1)))[0]
    h = start(2, 40, dtype)
    found = spectral_radius(lambda x: x @ q, h, method="krylov", tol=1e-3)
    torch.testing.assert_close(found, torch.ones(2, dtype=dtype), rtol=1e-3, atol=0)


def test_what_has_not_settled_is_said():
    q = torch.linalg.qr(torch.randn(40, 40, generator=torch.manual_seed(1)))[0]
    with pytest.warns(RuntimeWarning, match="2 of 2 samples are not within tol=0.001 after 3 prod"):
        spectral_radius(lambda x: x @ q, torch.randn(2, 40), method="krylov", steps=3, tol=1e-3)
