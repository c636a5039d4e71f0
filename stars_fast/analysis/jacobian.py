"""The block's Jacobian at a state, in numbers: how far it stretches, and in how many directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stars_fast.analysis.singular import singular_moments
from stars_fast.analysis.spectrum import settled_radius
from stars_fast.dual.repeatable import repeatable


@dataclass(frozen=True)
class Spectrum:
    """Spectra of B samples, fp64 on the CPU; NaN where a state or Jacobian is not finite.

    radius: [B], the largest modulus of an eigenvalue: by so much a small displacement grows a turn,
        in the long run.
    mean_square: [B], ||J||_F^2 / D, the mean squared singular value; the penalty with one power
        step is an estimate of it.
    r4: [B], (sum s^2)^2 / sum s^4, the number of singular values that carry it.
    settled: whether the residual of each sample's radius met the tolerance, or it has none.
    """

    radius: Tensor
    mean_square: Tensor
    r4: Tensor
    settled: bool

    @classmethod
    def join(cls, parts: list[Spectrum]) -> Spectrum:
        """The samples of several, in their order."""
        return cls(
            torch.cat([part.radius for part in parts]),
            torch.cat([part.mean_square for part in parts]),
            torch.cat([part.r4 for part in parts]),
            all(part.settled for part in parts),
        )


def spectrum(
    block: Callable[..., Any],
    h: Tensor,
    *,
    mask: Tensor | None = None,
    steps: int = 200,
    tol: float = 1e-3,
    probes: int = 32,
    generator: torch.Generator | None = None,
) -> Spectrum:
    """The Jacobian of `block` at each sample of `h` in three numbers, without gradient.

    All samples go through the block together, `steps` dual passes at most for the radius and
    `probes` dual passes with their reverse for the moments.

    Args:
        block, h, mask, steps, tol, generator: as of `spectral_radius`.
        probes: as of `singular_moments`.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named.
    """
    block = repeatable(block)
    found = settled_radius(block, h, mask=mask, steps=steps, tol=tol, generator=generator)
    moments = singular_moments(block, h, mask=mask, probes=probes, generator=generator)
    finite = finite_samples(h, mask) & moments.mean_square.isfinite()

    def kept(x: Tensor) -> Tensor:
        return torch.where(finite, x.double(), torch.nan).cpu()

    return Spectrum(
        kept(found.radius),
        kept(moments.mean_square),
        kept(moments.r4),
        bool(found.settled.all()),
    )


def finite_samples(h: Tensor, mask: Tensor | None = None) -> Tensor:
    """[B] bool: whether all entries of a sample are finite, those of pads aside."""
    good = h.isfinite().flatten(2).all(2) if h.dim() > 2 else h.isfinite()
    return (good if mask is None else good | ~mask.to(h.device, torch.bool)).flatten(1).all(1)
