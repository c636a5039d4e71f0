"""Paths of states in the plane in which they move most: principal components, by NumPy's SVD."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Projection(NamedTuple):
    """Paths of N samples in a basis that they share.

    points: [N, T + 1, k], coordinates in units of the states; NaN where a state is not finite.
    explained: [k], the share of the variance of all points along each axis, falling.
    axes: [k, D], orthonormal.
    origin: [D], the mean of all points, or what was asked for.
    """

    points: np.ndarray
    explained: np.ndarray
    axes: np.ndarray
    origin: np.ndarray


def principal_plane(
    paths: np.ndarray, components: int = 2, origin: np.ndarray | None = None
) -> Projection:
    """Principal components of paths [N, T + 1, D], all points of all samples together.

    The sign of an axis is such that its largest entry is positive. Points that are not finite are
    left out of the basis. With an `origin` [D] the variance is taken about it, and not the mean.

    Raises:
        ValueError: `paths` is not three-dimensional, has no finite point, or D is less than
            `components`.
    """
    if paths.ndim != 3:
        raise ValueError(f"paths: expected [N, T + 1, D], got {list(paths.shape)}")
    if not 1 <= components <= paths.shape[2]:
        raise ValueError(f"components: expected a value in 1..{paths.shape[2]}, got {components}")
    points = paths.astype(np.float64).reshape(-1, paths.shape[2])
    finite = np.isfinite(points).all(1)
    if not finite.any():
        raise ValueError("paths: expected a finite point, got none")
    scale = np.abs(points[finite]).max() or 1.0  # squares of a path that diverges would overflow
    scaled = points[finite] / scale
    mean = scaled.mean(0) if origin is None else origin / scale
    _, s, axes = np.linalg.svd(scaled - mean, full_matrices=False)
    if len(s) < components:
        raise ValueError(f"paths: expected at least {components} finite points, got {len(s)}")
    axes, variance = axes[:components], s**2
    signs = np.sign(axes[np.arange(components), np.abs(axes).argmax(1)])
    axes = axes * np.where(signs == 0, 1.0, signs)[:, None]
    coordinates = np.full((len(points), components), np.nan)
    coordinates[finite] = (scaled - mean) @ axes.T * scale
    total = variance.sum()
    explained = variance[:components] / total if total > 0 else np.zeros(components)
    return Projection(
        coordinates.reshape(*paths.shape[:2], components), explained, axes, mean * scale
    )
