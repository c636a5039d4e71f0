"""The files of an analysis: a page to read, the numbers, the pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stars_fast.analysis.measure import PATHS, Measured, Plan
from stars_fast.analysis.report.figures import (
    overview,
    paths_picture,
    quantity_picture,
    reach_of,
)
from stars_fast.analysis.report.numbers import record
from stars_fast.analysis.report.page import Picture, page
from stars_fast.analysis.report.quantities import QUANTITIES
from stars_fast.analysis.subjects import Request
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import write_text
from stars_fast.base.machine import describe
from stars_fast.base.plots import colour_of

READ_PATHS = (
    f"The states of one token of each sample (at most {PATHS}), in the plane in which they move "
    "most: each line is a sample, each dot a turn, the circle its start and the square its end. In "
    "the picture of the second half, the last state is the centre and 1 the largest norm, "
    "on the same scale for all runs, which ends at ten tolerances of the residual at the least: a "
    "state at rest is a spot, a cycle a ring or a star of the "
    "same few points, and a state that leaves a ray."
)


def write_analysis(
    runs: Mapping[str, Measured], out: Path, plan: Plan, request: Request, tol: float
) -> dict[str, Any]:
    """Write analysis.json, analysis.png, paths.png and analysis.html into the folder `out`, which
    is there, and return what `record` says of each run.

    runs: by label. plan, request: what was measured, and of what. tol: residual at rest.

    Raises:
        ConfigError: `out` can't be written.
    """
    found = record(runs, tol)
    settings = asdict(plan) | asdict(request) | {"device": str(request.device), "rest": tol}
    machine = describe(request.device)
    reach = reach_of(runs, tol)
    try:
        content = {"settings": settings, "machine": machine, "runs": found}
        write_text(out / "analysis.json", json.dumps(content, allow_nan=False) + "\n")
        (out / "analysis.png").write_bytes(overview(runs, reach))
        (out / "paths.png").write_bytes(paths_picture(runs, reach))
        colours = [colour_of(index) for index in range(len(runs))]
        shown = page(found, pictures(runs, reach), _settings(settings, machine), colours)
        write_text(out / "analysis.html", shown)
    except OSError as error:
        raise ConfigError(f"--out: can't write to {out}: {error.strerror}") from error
    return found


def pictures(runs: Mapping[str, Measured], reach: float) -> list[Picture]:
    """Those of the page, in their order; `reach` as of `paths_picture`."""
    shown = [q for q in QUANTITIES if any(q.values(run) is not None for run in runs.values())]
    found = [Picture(q.title, q.read, {"": quantity_picture(q, runs)}) for q in shown]
    paths = {label: paths_picture({label: run}, reach) for label, run in runs.items()}
    return [
        found[0]._replace(wide=True),
        Picture("Paths of the states", READ_PATHS, paths, wide=True),
        *found[1:],
    ]


def _settings(settings: Mapping[str, Any], machine: Mapping[str, Any]) -> dict[str, Any]:
    """For people."""
    return {
        "turns": settings["turns"],
        "Jacobian after turns": ", ".join(map(str, settings["jacobian_at"])),
        "samples": f"{settings['samples']} at most, {settings['batch']} at once",
        "token of the paths": f"{settings['place']} of those to be predicted",
        "at rest": f"residual below {settings['rest']:g}",
        "random directions": f"{settings['probes']} for the moments; seed {settings['seed']}",
        "radius": f"Krylov spaces, to a residual of {settings['tol']:g} or 200 products",
        "arithmetic": "float32; norms in float64",
        "machine": f"{machine['device']}, {machine['threads']} threads",
        "versions": f"stars_fast {machine['stars_fast']} ({machine['commit']}), torch "
        f"{machine['torch']}, Python {machine['python']}",
        "date": machine["date"],
    }
