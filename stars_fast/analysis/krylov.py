"""The largest eigenvalue modulus of many operators at once: Arnoldi's method, restarted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

VECTORS = 64
"""The most that the searched space has before it is begun anew."""
EVERY = 16
"""Products between two looks at the error."""


class Radius(NamedTuple):
    """radius: [B] fp64, NaN where a product was not finite. settled: [B] bool, whether the residual
    of its eigenpair met `tol`, or there is no radius to search."""

    radius: Tensor
    settled: Tensor


def krylov_radius(
    apply: Callable[[Tensor], Tensor], start: Tensor, *, steps: int = 200, tol: float = 1e-4
) -> Radius:
    """The spectral radius of each of B operators that `apply` applies to [B, ...] at once.

    For each a space of v, J v, J J v, ... is built, and its Ritz value of the largest modulus
    taken, until the residual ||J y - theta y|| of all is at most tol |theta|; a space of `VECTORS`
    is begun anew at its own y. Unlike power iteration it tells many eigenvalues of nearly the same
    modulus apart.

    The residual says that theta is an eigenvalue of an operator so near to J. Of a normal J some
    eigenvalue is as near to theta; of others, such as the Jacobian of causal attention, all may be
    farther, and the radius some percent off where the residual is small.

    Args:
        apply: linear in its argument, row by row.
        start: [B, ...], the first vectors; rows of 0 have radius 0.
        steps: most products.
        tol: residual over |theta| at which to stop.
    """
    shape, left = start.shape, steps
    v = unit(start.flatten(1))[0]
    while True:
        space = _Space(lambda x: apply(x.view(shape)).flatten(1), v, min(VECTORS, left))
        while True:
            left -= space.grow(min(EVERY, left))
            found, y = space.largest(tol)
            if found.settled.all() or not left:
                return Radius(found.radius.to(start.device), found.settled.to(start.device))
            if space.full:
                break
        v = unit(space.vector(y))[0]
        del space  # before the next, which is as large


class _Space:
    """Orthonormal vectors from `v` [B, N] on, `size` + 1 at most, and the operators within them, in
    fp64. Vectors of an exhausted space are 0."""

    def __init__(self, apply: Callable[[Tensor], Tensor], v: Tensor, size: int) -> None:
        self.apply, self.size, self.count = apply, size, 0
        self.basis = v.new_zeros(len(v), size + 1, v.shape[1])
        self.basis[:, 0] = v
        self.small = torch.zeros(len(v), size + 1, size, dtype=torch.float64, device=v.device)

    @property
    def full(self) -> bool:
        return self.count == self.size

    def grow(self, number: int) -> int:
        """By so many vectors or as many as there is room for, which it returns."""
        first, self.count = self.count, min(self.count + number, self.size)
        for j in range(first, self.count):
            w = self.apply(self.basis[:, j])
            before = w.double().norm(dim=1)
            known = self.basis[:, : j + 1]
            for _ in range(2):  # once leaves rounding that grows with j
                inner = known @ w.unsqueeze(2)
                w = w - (inner.mT @ known).squeeze(1)
                self.small[:, : j + 1, j] += inner.squeeze(2).double()
            new, length = unit(w)
            exhausted = length <= 10 * torch.finfo(w.dtype).eps * before
            self.basis[:, j + 1] = torch.where(exhausted[:, None], 0.0, new)
            self.small[:, j + 1, j] = torch.where(exhausted, 0.0, length)
        return self.count - first

    def largest(self, tol: float) -> tuple[Radius, Tensor]:
        """The Ritz values of the largest modulus, and their vectors in the basis, [B, count]."""
        n, small = self.count, self.small.cpu().clone()
        broken = ~small.isfinite().flatten(1).all(1)
        small[broken] = 0.0
        values, vectors = torch.linalg.eig(small[:, :n, :n])
        top = values.abs().argmax(1)
        each = torch.arange(len(top))
        radius, y = values.abs()[each, top], vectors[each, :, top]
        error = small[:, n, n - 1].abs() * y[:, -1].abs()
        settled = error <= tol * radius  # as 0 <= 0 where broken
        return Radius(radius.masked_fill(broken, torch.nan), settled), y

    def vector(self, y: Tensor) -> Tensor:
        """[B, N]: a real vector in the plane of the complex one, of which any will do. LAPACK turns
        a vector so that its largest entry is real: the real part is not 0."""
        real = y.real.to(self.basis)
        return (real.unsqueeze(1) @ self.basis[:, : self.count]).squeeze(1)


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, ...] over its norm, a row at a time, and the norm [B] in fp64; 0 stays 0."""
    norm = x.double().flatten(1).norm(dim=1)
    scale = torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1.0), 0.0)
    return x * scale.to(x.dtype).view(-1, *[1] * (x.dim() - 1)), norm
