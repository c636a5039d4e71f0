"""Settings of a study beside another one, seed by seed: what a seed does to both of a pair, such as
its first weights and its order of samples, is no part of their difference."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from studies.curves import AS_TRAINED, FURTHER, LENGTH, figures_of, number

FEWEST = 2
"""Seeds that both of a pair have, from which on they are compared."""


class Difference(NamedTuple):
    """How a setting differs from the one beside it after the most turns.

    levels: of the setting; with samples of several lengths theirs too, as `curves.LENGTH`.
    figure: the name of the figure.
    turns: after which it is taken.
    values: its differences, a seed each.
    better: on how many seeds the setting has the better one, which is the larger accuracy and the
        smaller of anything else.
    """

    levels: dict[str, str]
    figure: str
    turns: int
    values: list[float]
    better: int


def differences(
    records: Sequence[Mapping[str, Any]], against: Mapping[str, str]
) -> list[Difference]:
    """Each setting beside the one that has the levels of `against` in the place of its own.

    Args:
        records: those of `runner.run_entry`; the ones that are done count.
        against: {factor: level}.
    """
    settings: dict[tuple[tuple[str, str], ...], dict[int, Mapping[str, Any]]] = {}
    for entry in records:
        if entry["status"] == "done":
            seeds = settings.setdefault(tuple(entry["levels"].items()), {})
            seeds[entry["seed"]] = entry
    found = []
    for levels, runs in settings.items():
        beside = {name: against.get(name, level) for name, level in levels}
        others = settings.get(tuple(beside.items()), {})
        shared = sorted(runs.keys() & others.keys())
        if beside == dict(levels) or len(shared) < FEWEST:
            continue
        pairs = [(runs[seed], others[seed]) for seed in shared]
        names = _main(pairs)
        for name in names:
            length = {LENGTH: name.removeprefix(FURTHER)} if len(names) > 1 else {}
            if name == "accuracy" and length:
                length = {LENGTH: AS_TRAINED}
            found.append(_difference({**dict(levels), **length}, name, pairs))
    return found


def table(found: Sequence[Difference], against: Mapping[str, str]) -> list[str]:
    """The lines of a table in Markdown, with a sentence before it; none without a difference."""
    if not found:
        return []
    first, level = found[0], ", ".join(map(" ".join, against.items()))
    accuracy = first.figure.startswith("accuracy")
    name = "accuracy" if accuracy else first.figure.replace("_", " ")
    unit, scale, form = (" in points", 100, "+.1f") if accuracy else ("", 1, "+.3g")
    headings = [*first.levels, "difference", "better on", "seeds"]
    lines = [
        f"Beside {level}, seed by seed: the difference in {name}{unit} after {first.turns} turns, "
        "median and range.",
        "",
        f"| {' | '.join(headings)} |",
        "|---" * len(headings) + "|",
    ]
    for each in found:
        middle, low, high = (format(scale * pick(each.values), form) for pick in (median, min, max))
        cells = [*each.levels.values(), f"{middle} ({low} to {high})", each.better]
        lines.append(f"| {' | '.join(map(str, [*cells, len(each.values)]))} |")
    return lines


def _main(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """The accuracies that all of the pairs have, or the first of their figures."""
    every = [entry for pair in pairs for entry in pair]
    names = [name for name in figures_of(every[0]) if all(name in entry for entry in every)]
    return [n for n in names if n == "accuracy" or n.startswith(FURTHER)] or names[:1]


def _difference(
    levels: dict[str, str], name: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> Difference:
    turns = max(pairs[0][0][name], key=int)
    ends = [(number(one[name][turns]), number(other[name][turns])) for one, other in pairs]
    values = [0.0 if one == other else one - other for one, other in ends]  # inf is a failure
    larger = name.startswith("accuracy")
    better = sum(value > 0 if larger else value < 0 for value in values)
    return Difference(levels, name, int(turns), values, better)
