"""The spectral radius of a looped block at a state: how fast its turns converge there.

Both methods only apply the Jacobian, through `fused_jvp`. Krylov spaces run the whole batch at
once; Arnoldi (SciPy's ARPACK) takes samples one by one. Power iteration is no third: where several
eigenvalues have nearly the same modulus it needs far more products, or settles below the radius.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stars_fast.analysis.krylov import Radius, krylov_radius
from stars_fast.dual.repeatable import repeatable
from stars_fast.jsrr import fused_jvp
from stars_fast.ops.sample_norms import SampleNorms, sample_norms
from stars_fast.tokens import take_rows

Operator = Callable[[Tensor], Tensor]


def spectral_radius(
    block: Callable[..., Any],
    h: Tensor,
    *,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    mask: Tensor | None = None,
    method: Literal["krylov", "arnoldi"] = "krylov",
    steps: int = 200,
    tol: float = 1e-4,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Largest eigenvalue modulus of the block's Jacobian at each sample of `h`, without gradient.

    A block in training mode is held still: all products are with the dropout masks and buffers of
    one forward, and both are afterwards as after one.

    Args:
        block: any module or callable `h -> h'` that keeps the shape and treats the rows of the
            batch independently.
        h: the state, [B, ..., D] floating point.
        args, kwargs: further arguments of `block`. For "arnoldi", tensors among them whose first
            dimension is B are cut along with `h`.
        mask: [B, S] for h [B, S, D], True for real tokens: the Jacobian is restricted to them.
        method: "krylov" (all samples at once, keeps up to 65 states) or "arnoldi" (ARPACK, one
            sample at a time).
        steps: most products with the Jacobian, or restarts ("arnoldi"), per sample.
        tol: at which to stop: the residual ||J y - theta y|| / |theta| of an eigenpair. Of a normal
            Jacobian it is the accuracy of theta too; of others the radius may be some
            percent off where the residual is small. (The exact radius of a causal block is the
            largest, over the tokens, of those of its Jacobian's diagonal blocks.)
        generator: of the random start.

    Returns:
        [B] in fp32 (fp64 for fp64 input). 0 for samples without a real token.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named.
        RuntimeError: ARPACK found no eigenvalue within `steps` restarts; the sample is named.

    Warns:
        RuntimeWarning: the Krylov space did not settle to `tol` within `steps`;
            the last estimate is returned.
    """
    if method not in ("krylov", "arnoldi"):
        raise ValueError(f"method: expected 'krylov' or 'arnoldi', got {method!r}")
    rows = _checked_rows(h, mask, steps, tol)
    kwargs = kwargs or {}
    if method == "krylov":
        found = settled_radius(
            block, h, args=args, kwargs=kwargs, mask=mask, steps=steps, tol=tol, generator=generator
        )
        _warn_unsettled(int((~found.settled).sum()), len(h), steps, tol)
        return found.radius.to(rows.dtype)
    start = _start(h, rows, generator)
    with torch.no_grad():
        radii = [
            _arnoldi(block, h, (args, kwargs), rows, start, index, steps, tol)
            for index in range(h.shape[0])
        ]
    return torch.tensor(radii, dtype=rows.dtype, device=h.device)


@torch.no_grad()
def settled_radius(
    block: Callable[..., Any],
    h: Tensor,
    *,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    mask: Tensor | None = None,
    steps: int = 200,
    tol: float = 1e-4,
    generator: torch.Generator | None = None,
) -> Radius:
    """As `spectral_radius` by "krylov", and of each sample whether it settled, without a warning.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named.
    """
    rows = _checked_rows(h, mask, steps, tol)
    apply = _jacobian(block, h, args, kwargs or {}, rows)
    return krylov_radius(apply, _start(h, rows, generator), steps=steps, tol=tol)


def _checked_rows(h: Tensor, mask: Tensor | None, steps: int, tol: float) -> SampleNorms:
    if not isinstance(h, Tensor) or not h.is_floating_point():
        raise TypeError("h: expected a floating-point tensor")
    if steps < 2:
        raise ValueError(f"steps: expected at least 2, got {steps!r}")
    if not 0 < tol < 1:
        raise ValueError(f"tol: expected a number in (0, 1), got {tol!r}")
    return sample_norms(h, mask)


def _jacobian(
    block: Callable[..., Any],
    h: Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rows: SampleNorms,
) -> Operator:
    """The Jacobian of all samples at once, on their real tokens; one for all products, also where
    the block draws random numbers."""
    block = repeatable(block)

    def apply(v: Tensor) -> Tensor:
        jv = fused_jvp(block, h, v.to(h.dtype), args=args, kwargs=kwargs)[1].to(rows.dtype)
        return jv if rows.valid is None else jv * rows.valid

    return apply


def _start(h: Tensor, rows: SampleNorms, generator: torch.Generator | None) -> Tensor:
    """A random vector of each sample, 0 on pads."""
    start = torch.randn(h.shape, generator=generator, device=h.device, dtype=rows.dtype)
    return start if rows.valid is None else start * rows.valid


def _warn_unsettled(unsettled: int, samples: int, steps: int, tol: float) -> None:
    if unsettled:
        warnings.warn(
            f"spectral_radius: {unsettled} of {samples} samples are not within tol={tol:g} after "
            f"{steps} products; raise steps, or use method='arnoldi'",
            RuntimeWarning,
            stacklevel=3,
        )


def _arnoldi(
    block: Callable[..., Any],
    h: Tensor,
    extra: tuple[Sequence[Any], dict[str, Any]],
    rows: SampleNorms,
    start: Tensor,
    index: int,
    steps: int,
    tol: float,
) -> float:
    import numpy as np
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs

    block = repeatable(block)
    sample, (args, kwargs) = _sample_of(h, extra, index)
    keep = torch.ones_like(sample, dtype=torch.bool)
    if rows.valid is not None:
        keep = keep & (rows.valid[index : index + 1] > 0)
    size = int(keep.sum())
    if size == 0:
        return 0.0

    def apply(x: Any) -> Any:
        v = torch.zeros_like(sample)
        v[keep] = torch.as_tensor(np.ravel(x)).to(v)
        return fused_jvp(block, sample, v, args=args, kwargs=kwargs)[1][keep].double().cpu().numpy()

    if size <= 3:  # ARPACK wants k < n - 1
        columns = np.stack([apply(row) for row in np.eye(size)], axis=1)
        return float(np.abs(np.linalg.eigvals(columns)).max())
    v0 = start[index : index + 1][keep].double().cpu().numpy()
    if not apply(v0).any():  # ARPACK can't start where the Jacobian vanishes
        return 0.0
    operator = LinearOperator((size, size), matvec=apply, dtype=np.float64)
    try:
        values = eigs(
            operator, k=1, which="LM", v0=v0, tol=tol, maxiter=steps, return_eigenvectors=False
        )
    except ArpackNoConvergence as error:
        if len(error.eigenvalues) == 0:
            raise RuntimeError(
                f"spectral_radius: ARPACK found no eigenvalue of sample {index} within "
                f"{steps} restarts to tol={tol:g}; raise steps or tol"
            ) from error
        values = error.eigenvalues
    return float(np.abs(values).max())


def _sample_of(h: Tensor, tree: Any, index: int) -> tuple[Tensor, Any]:
    """Sample `index` of a state and of the arguments that go with it, as a batch of one."""
    chosen = torch.tensor([index], device=h.device)
    return h[index : index + 1], take_rows(tree, chosen, h.shape[0], h.shape[1])
