"""The numbers of an analysis in words."""

from __future__ import annotations

import math
from collections import Counter

import torch

from stars_fast.analysis.measure import Measured
from stars_fast.analysis.report.summary import Summary, cycle_periods, median, motions
from stars_fast.analysis.trajectory import Trajectory, overflow_turns

EDGE = 0.02
"""A radius nearer to 1 says neither that a state contracts nor that it expands."""
MOST = 0.9
"""The part of the samples that stands for all."""
SAME = 0.01
"""A spread of the last states below this means that nothing is left of what tells samples apart."""
WORSE = 0.1
"""A loss of accuracy, or a part of the token loss, that is worth a word."""


def verdict(found: Measured, summary: Summary, tol: float) -> str:
    """Sentences: the last Jacobian, what the states do, what that does to the task, which comes
    first where the task is lost or was never learned. `tol` is the tolerance of the summary."""
    sentences = [_radius(summary), _motion(found, summary, tol), _meeting(found, summary)]
    first = _lost(summary) or _unlearned(summary)
    sentences.insert(0 if first else len(sentences), _quality(summary))
    return " ".join(sentence for sentence in sentences if sentence)


def _lost(summary: Summary) -> bool:
    """Whether the task is done notably worse after the most turns."""
    before, after = summary.quality
    if before is None or after is None:
        return False
    if summary.quality_name == "token loss":
        return after > (1 + WORSE) * before
    return before - after > WORSE


def _unlearned(summary: Summary) -> bool:
    """Whether less than half of the answers are right after the most turns."""
    after = summary.quality[1]
    return summary.quality_name == "accuracy" and after is not None and after < 0.5


def _radius(summary: Summary) -> str:
    inside, measured, deepest = summary.contracting, summary.measured, summary.deepest
    if not measured:
        return f"No Jacobian at turn {deepest}: no state there is finite."
    share = inside / measured
    assert summary.radius[1] is not None
    if abs(summary.radius[1] - 1) < EDGE:
        head = "On the edge"
    elif share >= MOST:
        head = "Contracts"
    else:
        head = "Expands" if share <= 1 - MOST else "Mixed"
    if deepest == summary.turns:
        head += " at depth"
    shown = f"radius below 1 for {inside} of {measured} samples"
    return f"{head}: {shown} at turn {deepest} (median {summary.radius[1]:.3g})."


def _motion(found: Measured, summary: Summary, tol: float) -> str:
    samples, path = summary.samples, found.trajectory
    own = motions(path, tol)
    parts = []
    for kind, count in summary.kinds.items():
        who = f"{count} of {samples}"
        if kind == "overflows":
            first = min(t for t in overflow_turns(path.finite) if t is not None)
            parts.append(f"{who} overflow, the first at turn {first}")
        elif kind == "converges":
            assert summary.convergence is not None
            since = f"from turn {math.ceil(summary.convergence)} on in the median"
            parts.append(f"{who} come to rest (residual below {tol:g} {since})")
        elif kind == "grows":
            growing = torch.tensor([each == "grows" for each in own])
            grown = median((path.norm[-1] / path.norm[summary.base])[growing])
            since = f"by the factor {grown:.3g} since turn {summary.base} in the median"
            parts.append(f"{who} keep growing (their norm {since})")
        elif kind == "slows":
            parts.append(f"{who} slow down (their steps still shrink at turn {summary.turns})")
        elif kind == "cycles":
            parts.append(f"{who} go round in a cycle{_period(path, own)}")
        else:
            parts.append(f"{who} move on without settling")
    return ", ".join(parts) + "."


def _meeting(found: Measured, summary: Summary) -> str:
    drawn = 0 if found.paths is None else len(found.paths.points)
    if drawn < 2 or summary.spread is None or summary.spread >= SAME:
        return ""
    return f"The token that is followed ends in the same state in all {drawn} samples drawn."


def _period(path: Trajectory, own: list[str]) -> str:
    each = zip(cycle_periods(path), own, strict=True)
    periods = Counter(p for p, kind in each if kind == "cycles").most_common()
    if len(periods) == 1:
        return f" of {periods[0][0]} turns"
    return f", most often of {periods[0][0]} turns"


def _quality(summary: Summary) -> str:
    before, after = summary.quality
    base, last = summary.base, summary.turns
    if before is None or after is None or base == last:
        return ""
    if summary.quality_name == "token loss":
        return f"Token loss: {before:.3f} nats at turn {base}, {after:.3f} at {last}."
    if abs(before - after) < 0.005:
        return f"Accuracy is {before:.1%} at turn {base} and {after:.1%} at {last}."
    word = "falls" if after < before else "rises"
    moved = f"Accuracy {word} from {before:.1%} at turn {base} to {after:.1%} at {last}."
    if _lost(summary) and summary.converged >= MOST * summary.samples:
        return f"{moved} So the states come to rest, but not at the answer."
    return moved
