"""The motion of a run's samples over the turns, and the run in one row of figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stars_fast.analysis.measure import Measured
from stars_fast.analysis.trajectory import Trajectory, convergence_turns, overflow_turns
from stars_fast.base.files import finite

GROWTH = 1.25
"""A norm that grows by more over the second half of the turns does not come to rest."""
RETURNED = 0.1
"""A state that comes back to this part of a step has closed a cycle."""
SHRUNK = 0.75
"""Steps that are smaller at the end than this part of those half-way still shrink."""

REST = 10
"""A state at rest has been nearer to its last than so many tolerances since half of the turns."""

MOTIONS = {
    "overflows": "a state is not finite",
    "grows": "the norm grows by more than a quarter over the second half of the turns",
    "converges": "the residual is below the tolerance at the end, and the distance over the second "
    f"half of the turns below {REST} tolerances",
    "slows": "the steps shrink by a quarter or more over the second half of the turns",
    "cycles": "the state comes back to where it was after a period, and its steps don't shrink",
    "wanders": "none of the above",
}
"""Kinds of motion of a sample; the first that holds counts."""


def motions(found: Trajectory, tol: float) -> list[str]:
    """The kind of motion of each sample, of `KINDS`; `tol` is the tolerance for the residual."""
    half = found.turns // 2
    rest, over = convergence_turns(found.residual, tol), overflow_turns(found.finite)
    periods, steps = cycle_periods(found), found.residual * found.norm[:-1]
    kinds = []
    for i in range(found.norm.shape[1]):
        if over[i] is not None:
            kinds.append("overflows")
        elif found.norm[-1, i] > GROWTH * found.norm[half, i]:
            kinds.append("grows")
        elif rest[i] is not None and found.to_last[half, i] < REST * tol:
            kinds.append("converges")
        elif _shrinks(steps[:, i], half):
            kinds.append("slows")
        else:
            kinds.append("cycles" if periods[i] else "wanders")
    return kinds


def _shrinks(steps: Tensor, half: int) -> bool:
    """Compared over a few turns each, as the steps of a cycle differ."""
    few = max(1, len(steps) // 8)
    return bool(steps[-few:].mean() < SHRUNK * steps[half : half + few].mean())


def cycle_periods(found: Trajectory) -> list[int | None]:
    """The period of each sample's cycle: the fewest turns, 2 or more, before the end at which the
    state was where it is at the end, and at twice as many again. None where it never was."""
    step = found.to_last[-2]
    for_all: list[int | None] = []
    for i in range(len(step)):
        distance = found.to_last[:, i].flip(0).tolist()  # by turns before the end
        limit = RETURNED * float(step[i])
        periods = (
            p
            for p in range(2, found.turns // 3 + 1)
            if distance[p] < limit and distance[2 * p] < 2 * limit
        )
        for_all.append(next(periods, None))
    return for_all


@dataclass(frozen=True)
class Summary:
    """The row of a run in the table.

    base: the most turns of the training, or `turns` if these are fewer. turns: all that were run.
    quality, residual: (at `base`, at `turns`), quality of the task and the median over samples of
        the residual (that of the last step where there is no next). None: no number, as below.
    growth: the norm at `turns` over that at `base`, the median.
    converged: samples that come to rest; convergence: the median of the turn from which they do.
    spread: of the last states of the samples; see `Measured`.
    kinds: how many samples do what.
    trained: of the turns with a Jacobian the last up to `base`, else the first; deepest: the last.
    radius, r4: (at `trained`, at `deepest`), medians over samples.
    contracting: samples with a radius below 1 at `deepest`; measured: those that have one.
    """

    base: int
    turns: int
    samples: int
    quality: tuple[float | None, float | None]
    quality_name: str
    residual: tuple[float | None, float | None]
    growth: float | None
    converged: int
    convergence: float | None
    spread: float | None
    kinds: dict[str, int]
    trained: int
    deepest: int
    radius: tuple[float | None, float | None]
    r4: tuple[float | None, float | None]
    contracting: int
    measured: int


def summarise(found: Measured, tol: float) -> Summary:
    """The summary of a run, with `tol` for the residual of a state at rest."""
    path, spectra, last = found.trajectory, found.jacobian, found.trajectory.turns
    most = found.subject.trained
    base = min(int(most[1] if isinstance(most, tuple) else most), last)
    trained, deepest = max((t for t in spectra if t <= base), default=min(spectra)), max(spectra)
    radii = spectra[deepest].radius
    own = motions(path, tol)
    turns = zip(convergence_turns(path.residual, tol), own, strict=True)
    rest = [float(t) for t, kind in turns if kind == "converges" and t is not None]
    quality = found.loss if found.accuracy is None else found.accuracy
    return Summary(
        base=base,
        turns=last,
        samples=len(own),
        quality=(finite(quality[base]), finite(quality[last])),
        quality_name="token loss" if found.accuracy is None else "accuracy",
        residual=(median(path.residual[min(base, last - 1)]), median(path.residual[-1])),
        growth=median(path.norm[-1] / path.norm[base]),
        converged=len(rest),
        convergence=median(torch.tensor(rest)),
        spread=finite(float(found.spread[-1])),
        kinds=dict(Counter(own).most_common()),
        trained=trained,
        deepest=deepest,
        radius=(median(spectra[trained].radius), median(radii)),
        r4=(median(spectra[trained].r4), median(spectra[deepest].r4)),
        contracting=int((radii < 1).sum()),
        measured=int(radii.isfinite().sum()),
    )


def median(values: Tensor) -> float | None:
    """The median of the finite values; None if there are none."""
    finite = values[values.isfinite()]
    return float(finite.quantile(0.5)) if len(finite) else None


def quartiles(values: Tensor) -> Tensor:
    """[3, n]: the lower quartile, the median and the upper of each row of `values` [n, B], of the
    finite ones; NaN where these are less than half, and would stand for others than themselves."""
    finite = values.isfinite()
    parts = torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype)
    found = torch.where(finite, values, torch.nan).nanquantile(parts, dim=1)
    return torch.where(2 * finite.sum(1) >= values.shape[1], found, torch.nan)


def sequence(values: Sequence[float] | Tensor) -> list:
    """The numbers of a tensor or list for JSON, None where one is not finite."""
    return finite(values.tolist() if isinstance(values, Tensor) else list(values))
