"""Everything that an analysis measures of one model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stars_fast.analysis.jacobian import Spectrum, finite_samples, spectrum
from stars_fast.analysis.pca import Projection, principal_plane
from stars_fast.analysis.spectrum import spectral_radius
from stars_fast.analysis.subjects import Subject
from stars_fast.analysis.trajectory import Trajectory, trajectory
from stars_fast.base.seeds import derive
from stars_fast.data.batches import MicroBatch
from stars_fast.models.loop import Loop

PATHS = 16
"""Samples whose path is kept and drawn."""

CHECKED = 2
"""Samples whose radius is computed by ARPACK too."""
RESTARTS = 10
"""The most of ARPACK, of about 20 products each."""


@dataclass(frozen=True)
class Plan:
    """The plan of an analysis.

    turns: how many of the block.
    jacobian_at: the turns after which the Jacobian is taken.
    place: the supervised token of each sample whose path is drawn: first, middle or last.
    probes: random directions for the moments of the singular values.
    tol: of the radius, as of `spectral_radius`.
    seed: of all random directions.
    """

    turns: int = 64
    jacobian_at: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    place: str = "middle"
    probes: int = 32
    tol: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """Measurements of a subject.

    trajectory: of all samples.
    jacobian: by turn, of all samples.
    check: (turn, radii as above, radii by ARPACK) of a few samples, NaN where ARPACK found none;
        None where no state is finite.
    accuracy: by turn, 1 to `turns`, or None. loss: by turn, token loss in nats of the samples.
    spread: [T + 1], the root mean square distance of the states of one token of the first samples
        from their mean, over the root mean square of their norms: 0 where all samples are in one
        state, whatever they began with. NaN where one is not finite.
    paths: the states of that token of the first samples, in their plane; None where less than two
        are finite.
    tail: the second half of the paths less their ends, over the largest norm in it, in a plane of
        its own, with the ends as origin; None where less than two of these are finite.
    """

    subject: Subject
    trajectory: Trajectory
    jacobian: dict[int, Spectrum]
    check: tuple[int, list[float], list[float]] | None
    accuracy: dict[int, float] | None
    loss: dict[int, float]
    spread: Tensor
    paths: Projection | None
    tail: Projection | None


def measure(
    subject: Subject, plan: Plan, say: Callable[[str], None] = lambda text: None
) -> Measured:
    """Load the model, run its turns and take the Jacobian at some of the states. `say` hears of the
    progress."""
    loop, count = subject.load(), len(subject.batches)
    batches = [
        _Batch(loop, batch, plan, number, _under(f"batch {number + 1} of {count}", say))
        for number, batch in enumerate(subject.batches)
    ]
    moved = [batch.run() for batch in batches]
    losses = torch.stack([batch.losses for batch in batches]).sum(0)
    losses = losses / sum(len(batch.batch.labels) for batch in batches)
    wanted = range(1, plan.turns + 1)
    paths = np.concatenate([batch.paths() for batch in batches])[:PATHS]
    return Measured(
        subject=subject,
        trajectory=Trajectory.join(moved),
        jacobian={t: Spectrum.join([b.spectra[t] for b in batches]) for t in plan.jacobian_at},
        check=next((b.check for b in batches if b.check is not None), None),
        accuracy=None if subject.accuracy is None else subject.accuracy(loop, list(wanted)),
        loss=dict(zip(wanted, losses.tolist(), strict=True)),
        spread=_spread(paths),
        paths=_plane(paths),
        tail=_plane(_tail(paths), np.zeros(paths.shape[-1])),
    )


def _under(head: str, say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: say(f"{head}: {text}")


class _Batch:
    """Some samples on their way through the turns."""

    def __init__(
        self, loop: Loop, batch: MicroBatch, plan: Plan, number: int, say: Callable[[str], None]
    ) -> None:
        self.loop, self.batch, self.plan, self.say = loop, batch, plan, say
        self.number, self.mask = number, batch.samples.real
        self.spectra: dict[int, Spectrum] = {}
        self.check: tuple[int, list[float], list[float]] | None = None
        self.losses = torch.zeros(plan.turns, dtype=torch.float64)
        self._path: list[np.ndarray] = []
        self._rows, self._columns = self._places()

    def run(self) -> Trajectory:
        self.say(f"{self.plan.turns} turns")
        with torch.no_grad():
            h0, self.inputs = self.loop.begin(self.batch.tokens, self.batch.samples)
            self.block = self.loop.turn(h0, self.batch.samples, self.inputs)
        return trajectory(self.block, h0, self.plan.turns, mask=self.mask, visit=self._visit)

    def paths(self) -> np.ndarray:
        """[B, T + 1, D]."""
        return np.stack(self._path, axis=1)

    def _places(self) -> tuple[Tensor, Tensor]:
        """The row and column of the token of each sample that is followed."""
        length = self.batch.tokens.shape[1]
        rows, columns = self.batch.positions // length, self.batch.positions % length
        chosen = []
        for row in range(len(self.batch.tokens)):
            own = columns[rows == row]
            chosen.append(own[{"first": 0, "middle": len(own) // 2, "last": -1}[self.plan.place]])
        return torch.arange(len(chosen), device=columns.device), torch.stack(chosen)

    @torch.no_grad()
    def _visit(self, turn: int, h: Tensor) -> None:
        self._path.append(h[self._rows, self._columns].float().cpu().numpy())
        if turn:
            self.losses[turn - 1] = self.loop.token_loss(h, self.batch, 1).double().cpu()
        if turn in self.plan.jacobian_at:
            plan = self.plan
            generator = self._generator(turn, h)
            self.say(f"Jacobian after turn {turn}")
            self.spectra[turn] = spectrum(
                self.block, h, mask=self.mask, tol=plan.tol, probes=plan.probes, generator=generator
            )
            if turn == max(plan.jacobian_at):
                self._check(turn, h)

    def _generator(self, turn: int, h: Tensor) -> torch.Generator:
        seed = derive(self.plan.seed, "analysis", turn, self.number)
        return torch.Generator(device=h.device).manual_seed(seed)

    def _check(self, turn: int, h: Tensor) -> None:
        finite = finite_samples(h, self.mask).nonzero().flatten().tolist()[:CHECKED]
        if self.number or not finite:
            return
        self.say(f"{len(finite)} radii of it by ARPACK")
        ours = self.spectra[turn].radius[finite].tolist()
        self.check = turn, ours, [self._arpack(turn, h, sample) for sample in finite]

    def _arpack(self, turn: int, h: Tensor, sample: int) -> float:
        part = self.batch.samples.subset([sample])
        state = part.cut(h)
        inputs = None if self.inputs is None else part.cut(self.inputs)
        try:
            radius = spectral_radius(
                self.loop.turn(state, part.tokens, inputs),
                state,
                mask=part.tokens.real,
                method="arnoldi",
                steps=RESTARTS,
                tol=self.plan.tol,
                generator=self._generator(turn, h),
            )
        except RuntimeError as error:
            if "ARPACK" not in str(error):
                raise
            return math.nan
        return float(radius)


def _spread(paths: np.ndarray) -> Tensor:
    points = torch.from_numpy(paths).double()
    apart = (points - points.mean(0)).square().sum(-1).mean(0).sqrt()
    spread = apart / points.square().sum(-1).mean(0).sqrt()
    return torch.where(spread.isfinite(), spread, torch.nan)


def _tail(paths: np.ndarray) -> np.ndarray:
    tail = paths[:, paths.shape[1] // 2 :].astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        size = np.linalg.norm(tail, axis=-1, keepdims=True).max(1, keepdims=True)
        return (tail - tail[:, -1:]) / size


def _plane(paths: np.ndarray, origin: np.ndarray | None = None) -> Projection | None:
    points = np.isfinite(paths).all(-1).sum()
    return principal_plane(paths, origin=origin) if points >= 2 else None
