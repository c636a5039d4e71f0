"""Quantities of each turn: where the numbers are, what they mean, how to read the picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stars_fast.analysis.measure import PATHS, Measured

Numbers = tuple[list[int], Tensor]
"""Turns, and values [n, B] of the samples at each of them."""


@dataclass(frozen=True)
class Quantity:
    """A number of each turn.

    key: its name in files. title, axis: of the picture. read: a sentence on what the picture shows
    and how to read it. definition: for the table of definitions.
    values: of a run; None where it has none.
    log: whether its axis is logarithmic; None where the numbers decide.
    line: a value that is worth a line. points: whether it is known at few turns only.
    """

    key: str
    title: str
    axis: str
    read: str
    definition: str
    values: Callable[[Measured], Numbers | None]
    log: bool | None = None
    line: float | None = None
    points: bool = False


def _per_turn(values: dict[int, float]) -> Numbers:
    return list(values), torch.tensor(list(values.values()), dtype=torch.float64)[:, None]


def _from(name: str, first: int) -> Callable[[Measured], Numbers]:
    """A field of the trajectory whose first row belongs to turn `first`."""

    def values(run: Measured) -> Numbers:
        found = getattr(run.trajectory, name)
        return list(range(first, first + len(found))), found

    return values


def _spectra(name: str) -> Callable[[Measured], Numbers]:
    def values(run: Measured) -> Numbers:
        return list(run.jacobian), torch.stack([getattr(s, name) for s in run.jacobian.values()])

    return values


QUANTITIES = (
    Quantity(
        "accuracy",
        "Accuracy",
        "sums answered exactly",
        "The share of unseen sums whose whole answer is right after so many turns: a model that "
        "scales keeps its line up to the right of the turns it was trained at.",
        "Share of unseen sums for which every digit of the answer and the end token is the most "
        "likely one, after so many turns.",
        lambda run: None if run.accuracy is None else _per_turn(run.accuracy),
        log=False,
    ),
    Quantity(
        "loss",
        "Token loss",
        "token loss (nats)",
        "The cross entropy of the samples' tokens after so many turns, lower is better: a model "
        "that scales keeps its line down to the right of the turns it was trained at.",
        "Mean cross entropy of the predicted tokens of the samples, in nats, after so many turns.",
        lambda run: None if run.accuracy is not None else _per_turn(run.loss),
    ),
    Quantity(
        "radius",
        "Spectral radius of the Jacobian",
        "spectral radius",
        "By how much a small displacement of the state grows a turn, in the long run: below the "
        "line at 1 neighbouring states come together, above it they part.",
        "The largest modulus of an eigenvalue of J, the Jacobian of one turn of the block at the "
        "state, over all real tokens of a sample.",
        _spectra("radius"),
        line=1.0,
        points=True,
    ),
    Quantity(
        "residual",
        "Residual",
        "residual",
        "How far the next turn moves the state, relative to its norm: a line that falls ever more "
        "steeply belongs to a state that comes to rest, a level one to a state that moves for "
        "ever, one that falls by half where the turns double to a state that grows steadily.",
        "||block(h) - h|| / ||h|| of the state h: the size of the step of the next turn, and the "
        "distance from being a fixed point.",
        _from("residual", 0),
        log=True,
    ),
    Quantity(
        "contraction",
        "Contraction",
        "step / step before",
        "The length of a step over that of the step before it: below the line at 1 the steps "
        "shrink, on it the state drifts or goes round. Where steps are rounding nothing is drawn.",
        "||h(t+1) - h(t)|| / ||h(t) - h(t-1)||; it tends to the spectral radius where the states "
        "come to rest.",
        _from("contraction", 1),
        line=1.0,
    ),
    Quantity(
        "cosine",
        "Direction",
        "cosine of successive steps",
        "Whether the state goes straight on (1), turns to the side (0) or jumps back (-1).",
        "Cosine of the angle between the step to a state and the step away from it.",
        _from("cosine", 1),
        log=False,
        line=0.0,
    ),
    Quantity(
        "norm",
        "Norm of the state",
        "root mean square",
        "How large the state is: a line that rises without end belongs to a state that leaves the "
        "region in which the model was trained.",
        "Root mean square of the entries of the state, over the real tokens of a sample.",
        _from("norm", 0),
    ),
    Quantity(
        "to_last",
        "Distance to the last state",
        "distance / norm",
        "How far the state still is from where it ends: a line that falls early is convergence, "
        "regular dips are a cycle, and a line that stays up until the last turns is a state that "
        "moves on.",
        "||h(t) - h(T)|| / ||h(T)||, with h(T) the state after the last turn.",
        _from("to_last", 0),
        log=True,
    ),
    Quantity(
        "spread",
        "Difference between samples",
        "spread / norm",
        "How far the states of one token of different samples are apart: where the line falls to 0 "
        "all end in one state, and nothing is left of what they began with.",
        "Root mean square distance of the states of one token of each sample that is drawn (the "
        f"first, at most {PATHS}) from their mean, over the root mean square of their norms.",
        lambda run: (list(range(len(run.spread))), run.spread[:, None]),
        log=False,
    ),
    Quantity(
        "mean_square",
        "Mean squared singular value",
        "||J||² / D",
        "How much the block stretches a random displacement in one turn, which is what the penalty "
        "of STARS presses down: it can be small where the radius above is not.",
        "||J||_F² / D, the Frobenius norm of the Jacobian, squared, over the number D of entries "
        "of the state: the mean of ||J v||² over unit vectors v.",
        _spectra("mean_square"),
        points=True,
    ),
    Quantity(
        "r4",
        "Number of singular values that matter",
        "r4",
        "How many directions carry the stretching: the higher, the better one random direction "
        "stands for all in the penalty.",
        "(sum s²)² / sum s⁴ over the singular values s of the Jacobian; one random direction "
        "estimates the penalty of a sample with a relative variance of at most 2 / r4.",
        _spectra("r4"),
        points=True,
    ),
)
