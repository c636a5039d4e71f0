"""Settings of a study beside another one, seed by seed: what a seed does to both of a pair, such as
its first weights and its order of samples, is no part of their difference."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from studies.curves import FURTHER, LENGTH, figures_of, length_of, number

Entry = Mapping[str, Any]
"""A record of `runner.run_entry`."""
FEWEST = 2
"""Seeds that both of a pair have, from which on they are compared."""
NEWEST = "lately"
"""The accuracy that is a mean over the newest checkpoints, where a study asks for it."""


class Difference(NamedTuple):
    """How a setting differs from the one beside it after the most turns.

    levels: of the setting; with samples of several lengths theirs too, as `curves.LENGTH`.
    figure: the name of the figure.
    turns: after which it is taken, the most that all compared runs have.
    values: its differences, a seed each.
    better: on how many seeds the setting has the better one, which is the larger accuracy and the
        smaller of anything else.
    failed: seeds of which the setting's run or the one beside it failed.
    """

    levels: dict[str, str]
    figure: str
    turns: int
    values: list[float]
    better: int
    failed: int


class _Pair(NamedTuple):
    """A setting's runs and those beside it, a seed each."""

    levels: dict[str, str]
    ones: list[Entry]
    others: list[Entry]
    failed: int


def differences(
    records: Sequence[Entry], against: Mapping[str, str], figure: str | None = None
) -> list[Difference]:
    """Each setting beside the one that has the levels of `against` in the place of its own.

    Args:
        records: those of `runner.run_entry`; the ones that are done are compared.
        against: {factor: level}.
        figure: the name of the figure that is compared; none if a record lacks it. By default the
            accuracies, or the first figure that all records have.
    """
    pairs = _pairs(records, against)
    done = [entry for pair in pairs for entry in (*pair.ones, *pair.others)]
    if not done:
        return []
    names = [name for name in figures_of(done[0]) if all(name in entry for entry in done)]
    if figure is None:
        names = [n for n in names if n == "accuracy" or n.startswith(FURTHER)] or names[:1]
    else:
        names = [figure] if figure in names else []
    shared = {name: set.intersection(*(set(entry[name]) for entry in done)) for name in names}
    return [
        _difference(
            pair.levels | ({LENGTH: length_of(name)} if len(names) > 1 else {}),
            name,
            max(map(int, shared[name])),
            pair,
        )
        for pair in pairs
        for name in names
        if shared[name]
    ]


def _pairs(records: Sequence[Entry], against: Mapping[str, str]) -> list[_Pair]:
    settings: dict[frozenset[tuple[str, str]], dict[int, Entry]] = {}
    for entry in records:
        settings.setdefault(frozenset(entry["levels"].items()), {})[entry["seed"]] = entry
    found = []
    for key, runs in settings.items():
        levels = next(iter(runs.values()))["levels"]
        beside = frozenset((name, against.get(name, level)) for name, level in levels.items())
        others = settings.get(beside, {}) if beside != key else {}
        both = [(runs[seed], others[seed]) for seed in sorted(runs.keys() & others.keys())]
        done = [pair for pair in both if all(entry["status"] == "done" for entry in pair)]
        failed = sum(any(entry["status"] == "failed" for entry in pair) for pair in both)
        if len(done) >= FEWEST:
            ones, beside_them = map(list, zip(*done, strict=True))
            found.append(_Pair(dict(levels), ones, beside_them, failed))
    return found


def _difference(levels: dict[str, str], name: str, turns: int, pair: _Pair) -> Difference:
    ends = [
        [number(entry[name][str(turns)]) for entry in runs] for runs in (pair.ones, pair.others)
    ]
    values = [0.0 if one == other else one - other for one, other in zip(*ends, strict=True)]
    larger = _is_accuracy(name)
    better = sum(value > 0 if larger else value < 0 for value in values)
    return Difference(levels, name, turns, values, better, pair.failed)


def table(found: Sequence[Difference], against: Mapping[str, str]) -> list[str]:
    """The lines of a table in Markdown, with a sentence before it; none without a difference."""
    if not found:
        return []
    first, level = found[0], ", ".join(map(" ".join, against.items()))
    accuracy = _is_accuracy(first.figure)
    name = "accuracy" if accuracy else first.figure.replace("_", " ")
    taken = " of the newest checkpoints (mean)" if first.figure == NEWEST else ""
    unit, scale, form = (" in points", 100, "+.1f") if accuracy else ("", 1, "+.3g")
    headings = [*first.levels, "difference", "better on", "seeds"]
    lines = [
        f"Beside {level}, seed by seed: the difference in {name}{taken}{unit} after {first.turns} "
        "turns, median and range.",
        "",
        f"| {' | '.join(headings)} |",
        "|---" * len(headings) + "|",
    ]
    for each in found:
        middle, low, high = (format(scale * pick(each.values), form) for pick in (median, min, max))
        seeds = f"{len(each.values)}" + (f", {each.failed} failed" if each.failed else "")
        cells = [*each.levels.values(), f"{middle} ({low} to {high})", str(each.better), seeds]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _is_accuracy(figure: str) -> bool:
    return figure == NEWEST or figure.startswith("accuracy")
