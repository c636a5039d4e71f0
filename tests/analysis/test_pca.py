"""Paths in a known plane."""

import numpy as np
import pytest

from stars_fast.analysis.pca import principal_plane


def in_a_plane(rng, width=7):
    """Paths [4, 9, width] in a plane: its axes [2, width], coordinates [4, 9, 2], and origin."""
    axes = np.linalg.qr(rng.normal(size=(width, 2)))[0].T
    coordinates = rng.normal(size=(4, 9, 2)) * [5.0, 1.0]
    coordinates -= coordinates.reshape(-1, 2).mean(0)
    origin = rng.normal(size=width)
    return origin + coordinates @ axes, axes, coordinates, origin


def test_the_plane_is_found_and_holds_everything():
    paths, axes, coordinates, origin = in_a_plane(np.random.default_rng(0))
    found = principal_plane(paths)
    assert found.points.shape == (4, 9, 2)
    np.testing.assert_allclose(found.explained.sum(), 1.0)
    assert found.explained[0] > found.explained[1]
    np.testing.assert_allclose(found.origin, origin)
    np.testing.assert_allclose(found.axes @ found.axes.T, np.eye(2), atol=1e-12)
    # The same plane, and the same points in it.
    np.testing.assert_allclose(found.axes.T @ found.axes, axes.T @ axes, atol=1e-12)
    np.testing.assert_allclose(found.origin + found.points @ found.axes, paths)
    variance = coordinates.reshape(-1, 2).var(0).sum()
    np.testing.assert_allclose(found.points.reshape(-1, 2).var(0).sum(), variance)


def test_the_sign_does_not_depend_on_the_solver():
    paths = in_a_plane(np.random.default_rng(1))[0]
    for axis in principal_plane(paths).axes:
        assert axis[np.abs(axis).argmax()] > 0


def test_about_an_origin_it_keeps_its_place():
    paths = in_a_plane(np.random.default_rng(2))[0]
    ends = paths - paths[:, -1:]
    found = principal_plane(ends, origin=np.zeros(7))
    np.testing.assert_allclose(found.points[:, -1], 0, atol=1e-12)
    np.testing.assert_allclose(found.points @ found.axes, ends, atol=1e-12)


def test_points_that_are_not_finite_are_left_out():
    paths = in_a_plane(np.random.default_rng(3))[0]
    broken = paths.copy()
    broken[2, 5:] = np.inf
    broken[1, 3, 0] = np.nan
    found = principal_plane(broken)
    lost = np.isnan(found.points).any(-1)
    assert lost.sum() == 5
    assert lost[2, 5:].all()
    assert lost[1, 3]
    np.testing.assert_allclose((found.origin + found.points @ found.axes)[~lost], paths[~lost])


def test_a_path_that_runs_away_does_not_overflow():
    paths = 2.0 ** np.arange(0, 900, 100)[None, :, None] * np.ones((1, 1, 3))
    found = principal_plane(paths)
    assert np.isfinite(found.points).all()
    np.testing.assert_allclose(found.explained, [1, 0], atol=1e-9)


def test_paths_that_do_not_move_explain_nothing():
    found = principal_plane(np.ones((2, 3, 4)))
    assert found.explained.tolist() == [0, 0]
    np.testing.assert_allclose(found.points, 0)


@pytest.mark.parametrize(
    ("paths", "components", "message"),
    [
        (np.ones((2, 3)), 2, r"paths: expected \[N, T \+ 1, D\], got \[2, 3\]"),
        (np.ones((2, 3, 1)), 2, r"components: expected a value in 1\.\.1, got 2"),
        (np.full((2, 3, 4), np.nan), 2, "paths: expected a finite point, got none"),
        (np.ones((1, 1, 4)), 2, "paths: expected at least 2 finite points, got 1"),
    ],
)
def test_mistakes_are_named(paths, components, message):
    with pytest.raises(ValueError, match=message):
        principal_plane(paths, components)
