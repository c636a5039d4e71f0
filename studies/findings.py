"""The paper's findings as statements that the numbers of a study agree with or not.

Each is judged by one or a few quantities with a bound each. The paper judges by eye; a bound is
where we would say that a reader of the figure sees it: half for "negligible against", 0.05 of
accuracy for "marginal", 0.1 for "visible", 0.2 for "a collapse", a factor of 2 for a state that
grows, and a step of 0.05 of the state for one that has come to rest.

The bounds were fixed before there were numbers. The settings of the quick scale were not: they were
chosen such that runs learn the task and differ past their depth (the comments of the YAML say how).

Three quantities were revised because they did not measure what the paper says, the first with a
bound that follows from its meaning, the others with the bound that was there:

    finding 2     the growth of the state with external norms, which cannot fail, as the closing
                  norm fixes the size: now the size of the last step, as the states are said to
                  settle
    lambda        the larger fall of 0.15 and 0.2, where both are said to be too large: now the
                  smaller
    ouro result   the loss of STARS at 4 turns against SFT's alone, where STARS is said to be the
                  best: now against the best of the others

Accuracies are medians over the seeds. "Deep" is the mean over the turns from the trained depth on,
even on a logarithmic axis (`curves.mean_over`); T is the mean number of turns in training. A
finding is judged when all settings of its study have as many finished runs and none failed; runs
that fail are part of finding 4 alone, which speaks of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any, NamedTuple

from studies.curves import Curve, SettingCurves, distance, gather, growth, mean_over
from studies.verdicts import NotJudged, Part, Verdict

INTERNAL, EXTERNAL = ("pre", "pre-sandwich"), ("post", "post-sandwich")
SANDWICHES = ("pre-sandwich", "post-sandwich")
FIXED = 4
"""Turns of the paper's fixed depth."""


class Finding(NamedTuple):
    """A claim of the paper, and what computes its parts.

    counts_failed: whether it is also about runs that fail, as ones that learn nothing.
    """

    claim: str
    judge: Callable[[Sequence[SettingCurves]], list[Part]]
    counts_failed: bool = False


def judge_findings(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """The findings of those names, held against the entries of `runner.run_entry`, which are those
    of all runs of the study."""
    return [_verdict(name, records) for name in names]


def _verdict(name: str, records: Sequence[Mapping[str, Any]]) -> Verdict:
    claim, judge, counts_failed = FINDINGS[name]
    try:
        _check_whole(records, counts_failed)
        return Verdict(name, claim, judge(gather(records, failed_as_wrong=counts_failed)))
    except NotJudged as reason:
        why_not = str(reason)
    except Exception as error:  # whatever it is, the numbers and other findings are to be written
        why_not = f"it could not be computed: {type(error).__name__}: {error}"
    return Verdict(name, claim, [], why_not)


def _check_whole(records: Sequence[Mapping[str, Any]], counts_failed: bool) -> None:
    """Raise NotJudged where the settings cannot be compared, as some have fewer runs."""
    if all(entry["status"] != "done" for entry in records):
        raise NotJudged("no finished run")
    failed = sorted({entry["label"] for entry in records if entry["status"] == "failed"})
    if failed and not counts_failed:
        raise NotJudged(f"failed runs of {'; '.join(failed)}")
    runs = Counter({entry["label"]: 0 for entry in records})
    runs.update(entry["label"] for entry in records if entry["status"] in ("done", "failed"))
    most = max(runs.values())
    fewer = [label for label, number in runs.items() if number < most]
    if fewer:
        raise NotJudged(
            f"{len(fewer)} of {len(runs)} settings have fewer runs than others, such as {fewer[0]}"
        )


def _by(results: Sequence[SettingCurves], *factors: str) -> dict[tuple[str, ...], SettingCurves]:
    """The results by their levels of `factors`."""
    return {tuple(result.levels[name] for name in factors): result for result in results}


def _need(found: Mapping[tuple[str, ...], SettingCurves], *wanted: tuple[str, ...]) -> None:
    """Raise NotJudged if one is not there."""
    lacking = [", ".join(levels) for levels in wanted if levels not in found]
    if lacking:
        raise NotJudged(f"no finished run of {'; '.join(lacking)}")


def _grid(
    results: Sequence[SettingCurves], placements: Sequence[str], factor: str
) -> dict[tuple[str, ...], SettingCurves]:
    """The results by placement and another factor, of which every pair of levels is there and has
    learned the task."""
    found = _by(results, "placement", factor)
    others = sorted({key[1] for key in found})
    if len(others) < 2:
        raise NotJudged(f"needs at least two levels of {factor}")
    _need(found, *((placement, other) for placement in placements for other in others))
    _need_learned(found.values())
    return found


def _need_learned(results: Iterable[SettingCurves]) -> None:
    """Raise NotJudged if one has not learned the task."""
    for result in results:
        if not _learned(result):
            raise NotJudged(f"{result.label} has not learned the task at its trained depth")


def _learned(result: SettingCurves) -> bool:
    """Whether half of the sums are right at T."""
    return result.median["accuracy"][result.depth] >= 0.5


def _deep(result: SettingCurves, first: int = FIXED) -> float:
    return mean_over(result.median["accuracy"], first)


def _kept(result: SettingCurves, times: int) -> float:
    """Accuracy at so many times T over that at T."""
    accuracy = result.median["accuracy"]
    return accuracy[min(times * result.depth, max(accuracy))] / accuracy[result.depth]


def _spreads(found: Mapping[tuple[str, ...], SettingCurves]) -> tuple[float, float]:
    """Mean distance of two accuracy curves that differ in the second level only, and of two that
    differ in the first only."""
    by_place: list[list[float]] = [[], []]
    for (one, a), (other, b) in combinations(found.items(), 2):
        same = [x == y for x, y in zip(one, other, strict=True)]
        if sum(same) == 1:
            first = min(a.depth, b.depth)
            by_place[same.index(True)].append(
                distance(a.median["accuracy"], b.median["accuracy"], first)
            )
    return fmean(by_place[0]), fmean(by_place[1])


def _last(curve: Curve) -> float:
    """After the most turns."""
    return curve[max(curve)]


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.inf


def _operator(results: Sequence[SettingCurves]) -> list[Part]:
    within, between = _spreads(_grid(results, INTERNAL + EXTERNAL, "norm"))
    return [
        Part(
            f"deep distance of the accuracy curves of two operators at one placement "
            f"({within:.3f}), over that of two placements with one operator ({between:.3f})",
            _ratio(within, between),
            "at most",
            0.5,
        )
    ]


def _systems(results: Sequence[SettingCurves]) -> list[Part]:
    found = _grid(results, INTERNAL + EXTERNAL, "norm")

    def over_norms(what: Callable[[SettingCurves], float]) -> dict[str, float]:
        return {
            placement: median(what(result) for key, result in found.items() if key[0] == placement)
            for placement in INTERNAL + EXTERNAL
        }

    grown = over_norms(growth)
    steps = over_norms(lambda result: _last(result.median["residual"]))
    early = over_norms(lambda result: _kept(result, 2))
    falls = over_norms(
        lambda result: result.median["accuracy"][result.depth] - _last(result.median["accuracy"])
    )
    return [
        Part(
            "internal norms, growth of the state from T to the most turns, the lesser placement",
            min(grown[p] for p in INTERNAL),
            "at least",
            2.0,
        ),
        Part(
            "external norms, size of the step at the most turns over that of the state, the larger "
            "placement",
            max(steps[p] for p in EXTERNAL),
            "at most",
            0.05,
        ),
        Part(
            "accuracy at 2 T over that at T, internal less external norms",
            fmean(early[p] for p in INTERNAL) - fmean(early[p] for p in EXTERNAL),
            "at least",
            0.0,
        ),
        Part(
            "fall of the accuracy from T to the most turns, the least of the four placements",
            min(falls.values()),
            "at least",
            0.2,
        ),
    ]


def _layers(results: Sequence[SettingCurves]) -> list[Part]:
    found = _grid(results, SANDWICHES, "layers")
    _need(found, *((placement, "only-recurrent") for placement in SANDWICHES))
    changed = [
        distance(alone.median["accuracy"], result.median["accuracy"], alone.depth)
        for (placement, layers), result in found.items()
        if layers != "only-recurrent"
        for alone in [found[placement, "only-recurrent"]]
    ]
    _, between = _spreads(found)
    within = fmean(changed)
    return [
        Part(
            f"deep distance of the accuracy curves with prelude or coda and without "
            f"({within:.3f}), over that of two placements with the same layers ({between:.3f})",
            _ratio(within, between),
            "at most",
            0.5,
        )
    ]


def _laws(results: Sequence[SettingCurves]) -> list[Part]:
    found = _by(results, "placement", "law")
    placements = INTERNAL + EXTERNAL
    fixed = f"fixed {FIXED}"
    _need(found, *((placement, fixed) for placement in placements))
    _need_learned(found[placement, fixed] for placement in placements)
    drawn = {key: result for key, result in found.items() if key[1] != fixed}
    learned = {key: result for key, result in drawn.items() if _learned(result)}
    gains = [_kept(result, 4) - _kept(found[key[0], fixed], 4) for key, result in learned.items()]
    grown = [growth(result) for key, result in learned.items() if key[0] in INTERNAL]
    if not grown:
        raise NotJudged("needs laws that learn the task, at an internal placement")
    deep = {
        placement: [_deep(result) for key, result in drawn.items() if key[0] == placement]
        for placement in placements
    }
    if few := [placement for placement, values in deep.items() if len(values) < 2]:
        raise NotJudged(f"needs two laws or more besides {fixed} at {', '.join(few)}")
    spreads = [max(values) - min(values) for values in deep.values()]
    return [
        Part(
            "accuracy at 4 T over that at T, a law less the fixed depth, median of the placements "
            f"and the laws that learn the task ({len(learned)} of {len(drawn)})",
            median(gains),
            "at least",
            0.1,
        ),
        Part(
            "internal norms at random depth, growth of the state from T to the most turns, median",
            median(grown),
            "at least",
            2.0,
        ),
        Part(
            f"range over the laws of the mean accuracy from {FIXED} turns on, the largest of the "
            "placements",
            max(spreads),
            "at least",
            0.1,
        ),
    ]


def _l2(results: Sequence[SettingCurves]) -> list[Part]:
    found = _by(results, "placement", "depth", "penalty")
    depths = ("fixed", "random")
    kinds = ("none", "L2")
    _need(found, *((p, depth, kind) for p in SANDWICHES for depth in depths for kind in kinds))
    _need_learned(found[p, depth, "none"] for p in SANDWICHES for depth in depths)
    gains = {
        depth: [_deep(found[p, depth, "L2"]) - _deep(found[p, depth, "none"]) for p in SANDWICHES]
        for depth in depths
    }
    return [
        Part(
            f"{depth} depth, mean accuracy from {FIXED} turns on with L2 less without, the larger "
            "placement",
            max(gains[depth]),
            "at most",
            0.05,
        )
        for depth in depths
    ]


def _methods(results: Sequence[SettingCurves]) -> list[Part]:
    found = _by(results, "method")
    _need(found, *((name,) for name in ("sft", "random-loop", "jsrr", "stars")))
    stars = found[("stars",)]
    others = [_deep(result) for key, result in found.items() if key != ("stars",)]
    deepest = max(stars.median["radius"])
    return [
        Part(
            f"STARS, least accuracy from {FIXED} turns on",
            min(value for t, value in stars.median["accuracy"].items() if t >= FIXED),
            "at least",
            0.99,
        ),
        Part(
            f"mean accuracy from {FIXED} turns on, STARS less the best other method",
            _deep(stars) - max(others),
            "at least",
            0.0,
        ),
        Part(
            f"STARS, spectral radius at {deepest} turns, mean of the samples ({_samples(stars)})",
            _last(stars.median["radius"]),
            "below",
            1.0,
        ),
    ]


def _samples(result: SettingCurves) -> str:
    """How many samples the mean of the radius after the most turns stands for."""
    shares = (_last(result.median[name]) for name in ("contracting", "settled"))
    return "{:.0%} of them below 1, {:.0%} settled".format(*shares)


def _weights(results: Sequence[SettingCurves]) -> list[Part]:
    found = _by(results, "lambda")
    _need(found, *((name,) for name in ("0", "0.1", "0.15", "0.2")))
    at_depth = {
        float(key[0]): result.median["accuracy"][result.depth] for key, result in found.items()
    }
    penalised = [result for key, result in found.items() if float(key[0]) > 0]
    largest = max(penalised, key=lambda result: _last(result.median["radius"]))
    return [
        Part(
            "accuracy at T, the least of lambda up to 0.1",
            min(value for weight, value in at_depth.items() if weight <= 0.1),
            "at least",
            0.9,
        ),
        Part(
            "fall of the accuracy at T from lambda 0.1 to 0.15 or 0.2, the smaller",
            min(at_depth[0.1] - at_depth[weight] for weight in (0.15, 0.2)),
            "at least",
            0.1,
        ),
        Part(
            f"spectral radius at {max(largest.median['radius'])} turns, mean of the samples, the "
            f"largest with a penalty ({largest.label}: {_samples(largest)})",
            _last(largest.median["radius"]),
            "at most",
            1.0,
        ),
    ]


def _ouro(results: Sequence[SettingCurves]) -> list[Part]:
    found = _by(results, "method")
    _need(found, *((name,) for name in ("sft", "random-loop", "jsrr", "stars")))
    if any("validation_loss" not in result.median for result in results):
        raise NotJudged("there is no validation loss of all runs: it needs data.validation")
    loss = {key[0]: result.median["validation_loss"] for key, result in found.items()}
    for turns in (FIXED, 2 * FIXED):
        if any(turns not in curve for curve in loss.values()):
            raise NotJudged(f"eval.turns lacks {turns}")
    if not all(math.isfinite(curve[FIXED]) for curve in loss.values()):
        raise NotJudged(f"the validation loss at {FIXED} turns is not finite")
    rise = {name: curve[2 * FIXED] - curve[FIXED] for name, curve in loss.items()}
    of = f"from {FIXED} to {2 * FIXED} turns"
    return [
        Part(f"SFT, rise of the validation loss {of}", rise["sft"], "at least", 0.1),
        Part(
            f"rise {of}, random loop or JSRR less SFT, the larger",
            max(rise["random-loop"], rise["jsrr"]) - rise["sft"],
            "below",
            0.0,
        ),
        Part(
            f"rise {of}, STARS less the better of random loop and JSRR",
            rise["stars"] - min(rise["random-loop"], rise["jsrr"]),
            "at most",
            0.0,
        ),
        Part(
            f"loss at {FIXED} turns, STARS less the best other method",
            loss["stars"][FIXED] - min(loss[m][FIXED] for m in ("sft", "random-loop", "jsrr")),
            "at most",
            0.0,
        ),
    ]


FINDINGS = {
    "finding 1": Finding(
        "the norm operator has a negligible impact, its placement decides", _operator
    ),
    "finding 2": Finding(
        "internal norms keep early performance and drift; with external ones the states settle, in "
        "poor ones",
        _systems,
    ),
    "finding 3": Finding("prelude and coda layers do not change the dynamics", _layers),
    "finding 4": Finding(
        "drawing the number of turns helps retention, does not end the drift, and is sensitive to "
        "the range",
        _laws,
        counts_failed=True,
    ),
    "finding 5": Finding(
        "L2 between adjacent states helps little, nor together with random depth", _l2
    ),
    "addition result": Finding(
        "with STARS the accuracy stays at 100 % whatever the number of turns (here from 4 on), no "
        "part of it alone does better, and the states converge to a fixed point, where the "
        "spectral radius is below 1",
        _methods,
    ),
    "lambda": Finding(
        "the states converge at every lambda above 0, and the accuracy drops from 0.15 on", _weights
    ),
    "ouro result": Finding(
        "past the trained depth SFT collapses; random loop and JSRR each slow that, both together "
        "most, and STARS is the best at 4 turns",
        _ouro,
    ),
}
