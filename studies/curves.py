"""The curves of a compared setting: medians over its seeds, as findings, table and figure read
them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Curve = dict[int, float]
"""A figure by number of turns."""
NOT_CURVES = ("levels", "overrides", "machine")
FURTHER = "accuracy_"
"""Beginning of the names of the accuracies on further samples."""
LENGTH = "length"
AS_TRAINED = "as trained"
"""The factor that tells the samples apart where there are further, longer ones."""


@dataclass(frozen=True)
class SettingCurves:
    """Curves of the runs of one setting.

    levels: the level of each factor.
    seeds: number of runs.
    depth: mean number of turns in training, rounded.
    deepest: the most turns of 98 % of the training.
    seconds: of training, median; NaN if no run finished.
    cost: counted, over SFT; NaN where it is not.
    median, low, high: {figure: curve} over the seeds; a value that was not finite is infinity.
    """

    levels: dict[str, str]
    seeds: int
    depth: int
    deepest: int
    seconds: float
    cost: float
    median: dict[str, Curve]
    low: dict[str, Curve]
    high: dict[str, Curve]

    @property
    def label(self) -> str:
        """The levels in a line."""
        return ", ".join(self.levels.values())

    @property
    def main(self) -> str:
        """The figure that table and picture show: accuracy, or the first that there is."""
        return "accuracy" if "accuracy" in self.median else next(iter(self.median))


def gather(
    records: Sequence[Mapping[str, Any]], failed_as_wrong: bool = False
) -> list[SettingCurves]:
    """The results of the records of `runner.run_entry` that are done, in their order.

    Of the figures those that all of them have; no result if there is none. With `failed_as_wrong`
    (of addition) runs that failed count too, with an accuracy of 0 at every number of turns; the
    other figures are those of the finished runs.
    """
    done = [entry for entry in records if entry["status"] == "done"]
    figures = [name for name in figures_of(done[0]) if all(name in e for e in done)] if done else []
    if not figures:
        return []
    wrong = {"accuracy": dict.fromkeys(done[0]["accuracy"], 0.0)} if failed_as_wrong else {}
    counted = ("done", "failed") if failed_as_wrong else ("done",)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in records:
        if entry["status"] in counted:
            added = wrong if entry["status"] == "failed" else {}
            groups.setdefault(entry["label"], []).append({**entry, **added})
    return [_result(entries, figures) for entries in groups.values()]


def figures_of(entry: Mapping[str, Any]) -> list[str]:
    """Names of the figures by number of turns in a record."""
    return [
        name for name, value in entry.items() if isinstance(value, dict) and name not in NOT_CURVES
    ]


def _result(entries: list[Mapping[str, Any]], figures: list[str]) -> SettingCurves:
    first = entries[0]
    curves = {name: found for name in figures if (found := [e[name] for e in entries if name in e])}
    over = {
        how: {
            name: {int(t): pick([number(curve[t]) for curve in found]) for t in found[0]}
            for name, found in curves.items()
        }
        for how, pick in (("median", statistics.median), ("low", min), ("high", max))
    }
    seconds = [entry["seconds"] for entry in entries if "seconds" in entry]
    return SettingCurves(
        first["levels"],
        len(entries),
        max(round(first["depth"]), 1),
        first["trained_turns"][-1],
        statistics.median(seconds) if seconds else math.nan,
        first.get("counted_cost", math.nan),
        **over,
    )


def by_length(results: Sequence[SettingCurves]) -> list[SettingCurves]:
    """The accuracies on samples of each length as settings of their own, with the length as a
    factor; `results` as they are where there is one length."""
    names = [name for name in results[0].median if name.startswith(FURTHER)] if results else []
    if not names:
        return list(results)
    return [
        replace(
            result,
            levels={**result.levels, LENGTH: length_of(name)},
            median={"accuracy": result.median[name]},
            low={"accuracy": result.low[name]},
            high={"accuracy": result.high[name]},
        )
        for name in ("accuracy", *names)
        for result in results
    ]


def length_of(name: str) -> str:
    """The level of `LENGTH` that an accuracy is of, by its name."""
    return AS_TRAINED if name == "accuracy" else name.removeprefix(FURTHER)


def number(value: float | None) -> float:
    """A value of a record, infinity for one that was not finite."""
    return math.inf if value is None else value


def least(curve: Curve, first: int) -> float:
    """The least value of a curve over its turns from `first` on."""
    return min(value for turns, value in curve.items() if turns >= first)


def mean_over(curve: Curve, first: int) -> float:
    """Mean of a curve over its turns from `first` on, even on a logarithmic axis of turns (a
    weight of 1 / turns where every number of turns is there)."""
    turns = sorted(t for t in curve if t >= first)
    weights = [1 / t for t in turns]
    return sum(curve[t] * w for t, w in zip(turns, weights, strict=True)) / sum(weights)


def distance(one: Curve, other: Curve, first: int) -> float:
    """Mean difference of two curves over the turns from `first` on, as `mean_over`."""
    return mean_over({t: abs(one[t] - other[t]) for t in one}, first)


def growth(result: SettingCurves) -> float:
    """Size of the state after the most turns over that after the trained depth."""
    rms = result.median["rms"]
    return rms[max(rms)] / rms[result.depth]
