"""The numbers of an analysis as JSON, with all that they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from stars_fast.analysis.measure import Measured
from stars_fast.analysis.pca import Projection
from stars_fast.analysis.report.summary import motions, sequence, summarise
from stars_fast.analysis.report.words import verdict
from stars_fast.analysis.trajectory import Trajectory, convergence_turns, overflow_turns


def record(runs: Mapping[str, Measured], tol: float) -> dict[str, Any]:
    """{label: the numbers of the run}, plain values; None stands for a number that is not finite.

    By turn (from 0 unless a key says otherwise) and, within it, by sample. `tol` is the residual
    of a state at rest.
    """
    return {label: _run(run, tol) for label, run in runs.items()}


def _run(run: Measured, tol: float) -> dict[str, Any]:
    path, summary = run.trajectory, summarise(run, tol)
    own = {f.name: getattr(path, f.name) for f in fields(Trajectory)}
    return {
        "source": run.subject.source,
        "what": run.subject.what,
        "samples": run.subject.samples,
        "tokens": run.subject.tokens,
        "trained_turns": run.subject.trained,
        "verdict": verdict(run, summary, tol),
        "summary": asdict(summary),
        "accuracy": run.accuracy,
        "loss": dict(zip(run.loss, sequence(list(run.loss.values())), strict=True)),
        # Those of contraction and cosine begin at turn 1.
        "trajectory": {n: x.tolist() if n == "finite" else sequence(x) for n, x in own.items()},
        "convergence_turn": convergence_turns(path.residual, tol),
        "overflow_turn": overflow_turns(path.finite),
        "kind": motions(path, tol),
        "jacobian": {
            turn: {
                "radius": sequence(found.radius),
                "mean_square": sequence(found.mean_square),
                "r4": sequence(found.r4),
                "settled": found.settled,
            }
            for turn, found in run.jacobian.items()
        },
        "check": _check(run.check),
        "spread": sequence(run.spread),
        "paths": _projection(run.paths),
        "tail": _projection(run.tail),
    }


def _check(found: tuple[int, list[float], list[float]] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    turn, radius, arpack = found
    return {"turn": turn, "radius": sequence(radius), "arpack": sequence(arpack)}


def _projection(found: Projection | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "points": sequence(np.where(np.isfinite(found.points), found.points, np.nan).tolist()),
        "explained": found.explained.tolist(),
    }
