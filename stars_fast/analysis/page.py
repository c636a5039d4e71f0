"""An analysis as one HTML page that needs nothing else: no script, no font, no address."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from stars_fast.analysis.quantities import QUANTITIES
from stars_fast.analysis.summary import KINDS

STYLE = """
body { margin: 0 auto; max-width: 64rem; padding: 1rem; color: #1c1c1c; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid #ddd; }
.small { color: #555; font-size: 0.9rem; }
.run { border-left: 4px solid #0072b2; padding: 0.1rem 0 0.1rem 0.8rem; margin: 0.8rem 0; }
.run p { margin: 0.2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.95rem; }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 0.6rem;
  border-bottom: 1px solid #e4e4e4; overflow-wrap: anywhere; }
th { min-width: 7rem; }
td.n { font-variant-numeric: tabular-nums; min-width: 6rem; }
.figures { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.all { grid-column: 1 / -1; }
figure { margin: 0; break-inside: avoid; }
figcaption { font-size: 0.95rem; margin-bottom: 0.3rem; }
.beside { display: grid; gap: 0.5rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
@media print { body { max-width: none; font-size: 11pt; padding: 0; } h2 { break-after: avoid; }
  .wide { overflow-x: visible; } tr { break-inside: avoid; } }
"""


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
    names = " · ".join(runs)
    title = f"Latent dynamics: {names}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        '<p class="small">What the hidden state of a looped model does when its block is applied '
        "again and again, beyond the number of turns that it was trained at.</p>",
        "<h2>In words</h2>",
        *(
            _in_words(label, run, colour)
            for (label, run), colour in zip(runs.items(), colours, strict=True)
        ),
        "<h2>In figures</h2>",
        _summary(runs),
        "<h2>Turn by turn</h2>",
        '<p class="small">Lines are medians over the samples of a run, bands the half of the '
        "samples around them; nothing is drawn where less than half of the samples have a number. "
        "The shade marks the turns of the training, or bars on top where runs differ in them. "
        "The axis of the turns is logarithmic.</p>",
        '<div class="figures">',
        *(_figure(picture) for picture in pictures),
        "</div>",
        "<h2>What the words mean</h2>",
        _definitions(),
        "<h2>How it was measured</h2>",
        _pairs({key: str(value) for key, value in settings.items()}),
        *_notes(runs),
    ]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )


def _in_words(label: str, run: Mapping[str, Any], colour: str) -> str:
    return (
        f'<div class="run" style="border-color: {escape(colour)}"><p><strong>{escape(label)}'
        f"</strong> {escape(run['verdict'])}</p>"
        f'<p class="small">{escape(run["source"])}: {escape(run["what"])}</p></div>'
    )


def _summary(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Figures down, runs across."""
    rows = [(name, [show(run) for run in runs.values()]) for name, show in ROWS]
    head = "".join(f"<th>{escape(label)}</th>" for label in runs)
    lines = [
        f"<tr><th>{escape(name)}</th>"
        + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, cells in rows
    ]
    return (
        f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>'
        + "\n".join(lines)
        + "</tbody></table></div>"
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


ROWS: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
    ("turns of the training", _trained),
    ("turns compared (a → b)", _turns("base", "turns")),
    ("accuracy or token loss (a → b)", _quality),
    ("residual (a → b)", _two("residual")),
    ("norm at b over that at a", lambda r: _shown(r["summary"]["growth"])),
    ("samples that come to rest", _at_rest),
    ("spread of the samples at b", lambda r: _shown(r["summary"]["spread"])),
    ("turns of the Jacobian (c → d)", _turns("trained", "deepest")),
    ("spectral radius (c → d)", _two("radius")),
    ("radius below 1 at d", _contracting),
    ("r4 (c → d)", _two("r4")),
)


def _figure(picture: Picture) -> str:
    images = "".join(
        f'<img alt="{escape(f"{picture.title} {label}".strip())}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for label, png in picture.pngs.items()
    )
    wide = ' class="all"' if picture.wide else ""
    caption = f"<strong>{escape(picture.title)}.</strong> {escape(picture.read)}"
    return (
        f"<figure{wide}><figcaption>{caption}</figcaption>"
        f'<div class="beside">{images}</div></figure>'
    )


def _definitions() -> str:
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
    listed = "; ".join(f"{name}: {text}" for name, text in KINDS.items())
    words["kinds of motion"] = f"The first that holds of a sample: {listed}."
    return _pairs(words)


def _pairs(pairs: Mapping[str, str]) -> str:
    rows = (
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in pairs.items()
    )
    return f'<div class="wide"><table><tbody>{"".join(rows)}</tbody></table></div>'


def _notes(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What to know of the radii: those that did not settle, and what ARPACK says."""
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
    return [f'<p class="small">{escape(note)}</p>' for note in notes]


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
