"""Outcome of a study: study.json, a table in Markdown and the figure, all in its folder."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stars_fast.base.files import write_text
from studies.curves import LENGTH, SettingCurves, by_length, gather, growth, least
from studies.definition import Study
from studies.findings import FIXED, judge_findings
from studies.judging import LATELY
from studies.paired import NEWEST, differences
from studies.paired import table as paired_table
from studies.verdicts import Verdict

TABLE_TURNS = (1, 2, 4, 8, 16, 32, 64, 100, 200)
"""Turns that the table has a column for, where there are more than these."""

MANY = 20
"""Lines on runs that are not done, up to which each has its own."""

_NOTE = (
    "Radius: the block's spectral radius at the state after so many turns, mean of some samples, "
    "with the share of them that is below 1; ~: not settled for all of them. Growth: size of the "
    "state after the most turns over that after the turns of training. s: seconds of training."
)

_COSTS = (
    "Least: over all turns from 4 on; last four: over some of them, of the mean of the newest "
    f"checkpoints on {LATELY} sums. "
    "Apart: how far the state that follows a first state of noise is from the usual one, over its "
    "size. Cost: of a step over SFT's, by count of turns, in which an adapter is free; "
    "`python -m benchmarks.rivals_cost` measures it."
)


def write_outcome(
    study: Study,
    scale: str,
    out: Path,
    records: Sequence[Mapping[str, Any]],
    words: Sequence[str] = (),
) -> str:
    """Write study.json, table.md and figure.png to `out`; returns the text of the table.

    `records` are those of `runner.run_entry`, `words` the overrides of the command line. Without a
    finished run there is no figure.
    """
    verdicts = judge_findings(study.findings, records)
    content = {
        "study": study.name,
        "title": study.title,
        "asks": study.asks,
        "scale": scale,
        "base": study.at(scale).base,
        "settings": study.at(scale).settings,
        "overrides": list(words),
        "findings": [verdict.to_dict() for verdict in verdicts],
        "runs": list(records),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "study.json", json.dumps(content, indent=1) + "\n")
    results = by_length(gather(records))
    text = outcome_table(study, scale, records, results, verdicts)
    write_text(out / "table.md", text)
    if results:
        from studies.figure import draw_panels

        panels = LENGTH if results and LENGTH in results[0].levels else study.panels
        draw_panels(results, out / "figure.png", title=study.title, panels=panels)
    return text


def outcome_table(
    study: Study,
    scale: str,
    records: Sequence[Mapping[str, Any]],
    results: Sequence[SettingCurves],
    verdicts: Sequence[Verdict],
) -> str:
    """The results and the verdicts in Markdown; medians, with the range over the seeds behind."""
    blocks = [[f"# {study.title} ({study.name}, {scale})"], [study.asks]]
    if results:
        rows = _rows(results)
        if study.reference is not None:
            rows = _beside(rows, _cost_columns(results))
        blocks += [rows, [_NOTE] if "radius" in results[0].median else []]
        blocks += [[_COSTS] if study.reference is not None else []]
    if study.against:
        for figure in (None, NEWEST):
            found = differences(records, study.against, figure)
            blocks.append(paired_table(found, study.against))
    blocks.append(_left_out(records))
    for verdict in verdicts:
        reasons = [*map(str, verdict.parts), verdict.why_not]
        blocks.append([f"**{verdict.name.capitalize()}: {verdict.words}.** {verdict.claim}."])
        blocks.append([f"- {reason}" for reason in reasons if reason])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _rows(results: Sequence[SettingCurves]) -> list[str]:
    """The lines of the table itself."""
    figures = results[0].median
    main = results[0].main
    turns = sorted(figures[main])
    turns = [t for t in turns if t in TABLE_TURNS] if len(turns) > 2 * len(TABLE_TURNS) else turns
    radii = sorted(figures.get("radius", ()))
    factors = list(results[0].levels)
    headings = [*factors, "turns of training"]
    unit = " (%)" if main == "accuracy" else ""
    headings += [f"{main.replace('_', ' ')}{unit} at {turns[0]}", *map(str, turns[1:])]
    headings += ["radius at " + " / ".join(map(str, radii)), "growth"] if radii else []
    headings += ["seeds", "s"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for result in results:
        trained = str(result.depth)
        trained += f", to {result.deepest}" if result.deepest != result.depth else ""
        cells = [*result.levels.values(), trained]
        cells += [_cell(result, t) for t in turns]
        if radii:
            cells.append(" / ".join(_radius(result, t) for t in radii))
            cells.append(f"{growth(result):.2f}")
        cells += [str(result.seeds), f"{result.seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _left_out(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines on the runs that are not done, and how many there are; more than `MANY` of several
    factors in one line for each level of the first."""
    seeds: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for entry in records:
        if entry["status"] != "done":
            what = f"{entry['status']}: {entry['failed']}" if "failed" in entry else entry["status"]
            seeds.setdefault((tuple(entry["levels"].values()), what), []).append(str(entry["seed"]))
    done = sum(entry["status"] == "done" for entry in records)
    head = [f"{done} of {len(records)} runs are done. The others:", ""] if seeds else []
    lines: dict[tuple[str, str], list[str]] = {}
    for (levels, what), of in seeds.items():
        where = f"{'seed' if len(of) == 1 else 'seeds'} {', '.join(of)}: {what}"
        split = 1 if len(seeds) > MANY else len(levels)
        rest = ", ".join(levels[split:])
        lines.setdefault((", ".join(levels[:split]), where), []).append(rest)
    return head + [
        f"- {name}, {where}" + (f": {'; '.join(rests)}" if rests[0] else "")
        for (name, where), rests in lines.items()
    ]


def _beside(rows: list[str], columns: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with the cells of further columns, headings first, behind them."""
    heads, *cells = zip(*columns, strict=True)
    added = [heads, ["---"] * len(heads), *cells]
    joined = [f"{row} {' | '.join(more)} |" for row, more in zip(rows, added, strict=True)]
    joined[1] = rows[1] + "---|" * len(heads)
    return joined


def _cost_columns(results: Sequence[SettingCurves]) -> list[list[str]]:
    """Columns on what holds at all turns, and on costs; a dash where there is no figure."""

    def least_of(result: SettingCurves, name: str) -> float:
        return 100 * least(result.low[name], FIXED) if name in result.low else math.nan

    columns = {
        "least (%)": [least_of(result, "accuracy") for result in results],
        "last four (%)": [least_of(result, "lately") for result in results],
        "apart": [_last(result, "apart") for result in results],
        "cost": [result.cost for result in results],
    }
    forms = {"least (%)": ".1f", "last four (%)": ".1f", "apart": ".2g"}
    return [
        [name, *("-" if math.isnan(v) else format(v, forms.get(name, ".2f")) for v in values)]
        for name, values in columns.items()
    ]


def _last(result: SettingCurves, name: str) -> float:
    """A figure after the most turns; NaN without."""
    curve = result.median.get(name)
    return curve[max(curve)] if curve else math.nan


def _radius(result: SettingCurves, turns: int) -> str:
    radius, below, settled = (
        result.median[name][turns] for name in ("radius", "contracting", "settled")
    )
    return f"{'~' if settled < 1 else ''}{radius:.2f} ({below:.0%})"


def _cell(result: SettingCurves, turns: int) -> str:
    parts = (result.median, result.low, result.high)
    middle, low, high = (part[result.main][turns] for part in parts)
    if result.main == "accuracy":
        text = f"{100 * middle:.1f}"
        return text if low == high else f"{text} ({100 * low:.0f} to {100 * high:.0f})"
    return f"{middle:.3g}" if low == high else f"{middle:.3g} ({low:.3g} to {high:.3g})"
