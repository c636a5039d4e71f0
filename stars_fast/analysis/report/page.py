"""An analysis as one HTML page, of `page.html.j2`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stars_fast.analysis.report.quantities import QUANTITIES
from stars_fast.analysis.report.summary import MOTIONS
from stars_fast.base.optional import need

AGREE = 0.01
"""Two searches whose radii differ by a larger part don't confirm each other."""


class Picture(NamedTuple):
    """A title, what is shown and how to read it, the PNGs beside each other by label, and whether
    they take the whole width of the page."""

    title: str
    read: str
    pngs: Mapping[str, bytes]
    wide: bool = False


def page(
    runs: Mapping[str, Mapping[str, Any]],
    pictures: Sequence[Picture],
    settings: Mapping[str, Any],
    colours: Sequence[str],
) -> str:
    """The page.

    runs: by label, as `record` gives them.
    pictures: in their order.
    settings: names and values, for the end of the page.
    colours: of the runs in the pictures, one each.
    """
    jinja2 = need("jinja2", "reports of an analysis")
    folder = jinja2.PackageLoader("stars_fast", "analysis/report")
    environment = jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["base64"] = lambda png: base64.b64encode(png).decode()
    return environment.get_template("page.html.j2").render(
        title=f"Latent dynamics: {' · '.join(runs)}",
        runs=runs,
        rows={name: [show(run) for run in runs.values()] for name, show in TABLE_ROWS},
        pictures=pictures,
        colours=colours,
        definitions=_definitions(),
        settings=settings,
        notes=_notes(runs),
    )


def _shown(value: float | None, spec: str = ".4g") -> str:
    return "–" if value is None else format(value, spec)


def _two(key: str) -> Callable[[Mapping[str, Any]], str]:
    def show(run: Mapping[str, Any]) -> str:
        before, after = run["summary"][key]
        return f"{_shown(before)} → {_shown(after)}"

    return show


def _turns(first: str, last: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda run: f"{run['summary'][first]} → {run['summary'][last]}"


def _trained(run: Mapping[str, Any]) -> str:
    trained = run["trained_turns"]
    low, high = trained if isinstance(trained, (tuple, list)) else (trained, trained)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _quality(run: Mapping[str, Any]) -> str:
    summary = run["summary"]
    spec = ".1%" if summary["quality_name"] == "accuracy" else ".3f"
    before, after = (_shown(value, spec) for value in summary["quality"])
    return f"{before} → {after}"


def _contracting(run: Mapping[str, Any]) -> str:
    inside, measured = run["summary"]["contracting"], run["summary"]["measured"]
    return f"{inside} of {measured}" if measured else "–"


def _at_rest(run: Mapping[str, Any]) -> str:
    summary = run["summary"]
    count = f"{summary['converged']} of {summary['samples']}"
    if summary["convergence"] is None:
        return count
    return f"{count}, from turn {summary['convergence']:g}"


TABLE_ROWS: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
    ("Turns in training", _trained),
    ("Turns compared: in training → most that were run", _turns("base", "turns")),
    ("Accuracy, or token loss, at these", _quality),
    ("Residual: how far the next turn moves the state", _two("residual")),
    ("Growth of the state between them", lambda r: _shown(r["summary"]["growth"])),
    ("Samples that come to rest", _at_rest),
    ("Difference between samples at the end", lambda r: _shown(r["summary"]["spread"])),
    ("Turns with a Jacobian: in training → most", _turns("trained", "deepest")),
    ("Spectral radius at these (below 1 contracts)", _two("radius")),
    ("Samples with a radius below 1 at most turns", _contracting),
    ("Number of singular values that matter (r4)", _two("r4")),
)


def _definitions() -> dict[str, str]:
    words = {
        "turn": "One application of the shared block to the state, h(t+1) = block(h(t)).",
        "state": "h(t), the hidden vectors of all real tokens of a sample after t turns.",
    }
    words |= {quantity.title: quantity.definition for quantity in QUANTITIES}
    words["comes to rest"] = "Converges, of the kinds of motion below."
    words["components"] = (
        "The directions along which the drawn states vary most (principal components), with the "
        "share of the variance along each."
    )
    listed = "; ".join(f"{name}: {text}" for name, text in MOTIONS.items())
    words["kinds of motion"] = f"The first that holds of a sample: {listed}."
    return words


def _notes(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Notes on the radii: those that did not settle, and ARPACK's."""
    notes = []
    for label, run in runs.items():
        loose = [str(turn) for turn, found in run["jacobian"].items() if not found["settled"]]
        if loose:
            notes.append(
                f"{label}: at turns {', '.join(loose)} the search for the largest eigenvalue was "
                "stopped before it met its tolerance; radii there may be some percent off."
            )
        check = run["check"]
        if check is not None:
            notes.append(f"{label}: {_check(check)}")
    return notes


def _check(check: Mapping[str, Any]) -> str:
    pairs = list(zip(check["radius"], check["arpack"], strict=True))
    ours, arpack = (", ".join(map(_shown, values)) for values in zip(*pairs, strict=True))
    text = f"radii of the first samples at turn {check['turn']}: {ours}; by ARPACK: {arpack}."
    if any(b is None for _, b in pairs):
        text += " Where a dash stands ARPACK found none within its restarts."
    if any(a is not None and b is not None and abs(a - b) > AGREE * b for a, b in pairs):
        text += (
            f" Warning: they differ by more than {AGREE:.0%}, so the radii of this run are not "
            "known better than that."
        )
    return text
