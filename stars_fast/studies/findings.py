"""The paper's findings as statements that the numbers of a study agree with or not.

Each is judged by one or a few quantities with a bound each, fixed before there were numbers. The
paper judges by eye; a bound is where we would say that a reader of the figure sees it: half for
"negligible against", 0.05 of accuracy for "marginal", 0.1 for "visible", 0.2 for "a collapse", a
factor of 2 for a state that grows and 1.5 for one that is bounded.

Accuracies are medians over the seeds. "Deep" is the mean over the turns from the trained depth on,
even on a logarithmic axis (`curves.mean_over`); T is the mean number of turns in training.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any, NamedTuple

from stars_fast.studies.curves import Result, distance, growth, mean_over

INTERNAL, EXTERNAL = ("pre", "pre-sandwich"), ("post", "post-sandwich")
FIXED = 4
"""Turns of the paper's fixed depth."""
_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "at most": operator.le,
    "below": operator.lt,
}


class NotJudged(Exception):
    """A finding cannot be judged by these runs; the message says why."""


class Part(NamedTuple):
    """A quantity in words, its value, and what it should be: at least, at most or below `bound`."""

    what: str
    value: float
    how: str
    bound: float

    @property
    def agrees(self) -> bool:
        """Whether the value is within the bound."""
        return _BOUNDS[self.how](self.value, self.bound)

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "does not agree"
        return f"{self.what}: {self.value:.3g}, {self.how} {self.bound:g} expected: {verdict}"


@dataclass(frozen=True)
class Verdict:
    """A finding held against numbers: it agrees if all its parts do; None if it is not judged."""

    name: str
    claim: str
    parts: list[Part]
    why_not: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether the numbers agree with the claim."""
        return None if self.why_not else all(part.agrees for part in self.parts)

    @property
    def words(self) -> str:
        """The verdict in a word or two."""
        return {None: "not judged", True: "agrees", False: "does not agree"}[self.agrees]

    def to_dict(self) -> dict[str, Any]:
        """As study.json has it; a value that is not finite is None."""
        parts = [
            {
                "what": part.what,
                "value": part.value if math.isfinite(part.value) else None,
                "expected": f"{part.how} {part.bound:g}",
                "agrees": part.agrees,
            }
            for part in self.parts
        ]
        found = {"name": self.name, "claim": self.claim, "agrees": self.agrees, "parts": parts}
        return found | ({"why_not": self.why_not} if self.why_not else {})


class Finding(NamedTuple):
    """A claim of the paper, and what computes its parts."""

    claim: str
    judge: Callable[[Sequence[Result]], list[Part]]


def judge_findings(names: Sequence[str], results: Sequence[Result]) -> list[Verdict]:
    """The findings of those names, held against the results of a study."""
    verdicts = []
    for name in names:
        finding = FINDINGS[name]
        try:
            if not results:
                raise NotJudged("no finished run")
            verdicts.append(Verdict(name, finding.claim, finding.judge(results)))
        except NotJudged as reason:
            verdicts.append(Verdict(name, finding.claim, [], str(reason)))
    return verdicts


def _by(results: Sequence[Result], *factors: str) -> dict[tuple[str, ...], Result]:
    """The results by their levels of `factors`."""
    return {tuple(result.levels[name] for name in factors): result for result in results}


def _need(found: Mapping[tuple[str, ...], Result], *wanted: tuple[str, ...]) -> None:
    """Raises NotJudged if one is not there."""
    lacking = [", ".join(levels) for levels in wanted if levels not in found]
    if lacking:
        raise NotJudged(f"no finished run of {'; '.join(lacking)}")


def _grid(results: Sequence[Result], *factors: str) -> dict[tuple[str, ...], Result]:
    """The results by two factors of which every pair of levels is there and has learned the task:
    half of the sums right at T."""
    found = _by(results, *factors)
    firsts, seconds = ({key[i] for key in found} for i in (0, 1))
    if len(firsts) < 2 or len(seconds) < 2:
        raise NotJudged(f"needs at least two levels of each of {' and '.join(factors)}")
    _need(found, *((one, other) for one in sorted(firsts) for other in sorted(seconds)))
    for result in found.values():
        if not _learned(result):
            raise NotJudged(f"{result.label} has not learned the task at its trained depth")
    return found


def _learned(result: Result) -> bool:
    return result.median["accuracy"][result.depth] >= 0.5


def _deep(result: Result, first: int = FIXED) -> float:
    return mean_over(result.median["accuracy"], first)


def _kept(result: Result, times: int) -> float:
    """Accuracy at so many times T over that at T."""
    accuracy = result.median["accuracy"]
    return accuracy[min(times * result.depth, max(accuracy))] / accuracy[result.depth]


def _spreads(found: Mapping[tuple[str, ...], Result]) -> tuple[float, float]:
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


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.inf


def _operator(results: Sequence[Result]) -> list[Part]:
    within, between = _spreads(_grid(results, "placement", "norm"))
    return [
        Part(
            f"deep distance of the accuracy curves of two operators at one placement "
            f"({within:.3f}), over that of two placements with one operator ({between:.3f})",
            _ratio(within, between),
            "at most",
            0.5,
        )
    ]


def _systems(results: Sequence[Result]) -> list[Part]:
    found = _grid(results, "placement", "norm")
    _need({key[:1]: value for key, value in found.items()}, *((p,) for p in INTERNAL + EXTERNAL))

    def over_norms(what: Callable[[Result], float]) -> dict[str, float]:
        return {
            placement: median(what(result) for key, result in found.items() if key[0] == placement)
            for placement in INTERNAL + EXTERNAL
        }

    grown = over_norms(growth)
    early = over_norms(lambda result: _kept(result, 2))
    falls = over_norms(
        lambda result: (
            result.median["accuracy"][result.depth]
            - result.median["accuracy"][max(result.median["accuracy"])]
        )
    )
    return [
        Part(
            "internal norms, growth of the state from T to the most turns, the lesser placement",
            min(grown[p] for p in INTERNAL),
            "at least",
            2.0,
        ),
        Part(
            "external norms, the same, the larger placement",
            max(grown[p] for p in EXTERNAL),
            "at most",
            1.5,
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


def _layers(results: Sequence[Result]) -> list[Part]:
    found = _grid(results, "placement", "layers")
    _need(found, *((key[0], "only-recurrent") for key in found))
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


def _laws(results: Sequence[Result]) -> list[Part]:
    found = _by(results, "placement", "law")
    placements = list(dict.fromkeys(key[0] for key in found))
    fixed = f"fixed {FIXED}"
    _need(found, *((placement, fixed) for placement in placements))
    drawn = {key: result for key, result in found.items() if key[1] != fixed}
    learned = {key: result for key, result in drawn.items() if _learned(result)}
    gains = [_kept(result, 4) - _kept(found[key[0], fixed], 4) for key, result in learned.items()]
    grown = [growth(result) for key, result in learned.items() if key[0] in INTERNAL]
    if not grown or len(drawn) < 2:
        raise NotJudged("needs laws that learn the task, at an internal placement")
    spreads = [
        max(deep) - min(deep)
        for placement in placements
        if (deep := [_deep(result) for key, result in drawn.items() if key[0] == placement])
    ]
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


def _l2(results: Sequence[Result]) -> list[Part]:
    found = _by(results, "placement", "depth", "penalty")
    placements = sorted({key[0] for key in found})
    depths = ("fixed", "random")
    kinds = ("none", "L2")
    _need(found, *((p, depth, kind) for p in placements for depth in depths for kind in kinds))
    gains = {
        depth: [_deep(found[p, depth, "L2"]) - _deep(found[p, depth, "none"]) for p in placements]
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


def _methods(results: Sequence[Result]) -> list[Part]:
    found = _by(results, "method")
    _need(found, *((name,) for name in ("sft", "random-loop", "jsrr", "stars")))
    stars = found[("stars",)]
    others = [_deep(result) for key, result in found.items() if key != ("stars",)]
    radius = stars.median["radius"]
    deepest = max(radius)
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
        Part(f"STARS, spectral radius at {deepest} turns", radius[deepest], "below", 1.0),
    ]


def _weights(results: Sequence[Result]) -> list[Part]:
    found = _by(results, "lambda")
    _need(found, *((name,) for name in ("0", "0.1", "0.15", "0.2")))
    at_depth = {
        float(key[0]): result.median["accuracy"][result.depth] for key, result in found.items()
    }
    radii = [
        result.median["radius"][max(result.median["radius"])]
        for key, result in found.items()
        if float(key[0]) > 0
    ]
    return [
        Part(
            "accuracy at T, the least of lambda up to 0.1",
            min(value for weight, value in at_depth.items() if weight <= 0.1),
            "at least",
            0.9,
        ),
        Part(
            "fall of the accuracy at T from lambda 0.1 to 0.15 or 0.2, the larger",
            max(at_depth[0.1] - at_depth[weight] for weight in (0.15, 0.2)),
            "at least",
            0.1,
        ),
        Part(
            "spectral radius after the most turns, the largest with a penalty",
            max(radii),
            "at most",
            1.0,
        ),
    ]


def _ouro(results: Sequence[Result]) -> list[Part]:
    found = _by(results, "method")
    _need(found, *((name,) for name in ("sft", "random-loop", "jsrr", "stars")))
    loss = {key[0]: result.median["validation_loss"] for key, result in found.items()}
    for turns in (FIXED, 2 * FIXED):
        if any(turns not in curve for curve in loss.values()):
            raise NotJudged(f"eval.turns lacks {turns}")
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
            f"loss at {FIXED} turns, STARS less SFT",
            loss["stars"][FIXED] - loss["sft"][FIXED],
            "at most",
            0.0,
        ),
    ]


FINDINGS = {
    "finding 1": Finding(
        "the norm operator has a negligible impact, its placement decides", _operator
    ),
    "finding 2": Finding(
        "internal norms keep early performance and drift; external ones are bounded and settle in "
        "poor states",
        _systems,
    ),
    "finding 3": Finding("prelude and coda layers do not change the dynamics", _layers),
    "finding 4": Finding(
        "drawing the number of turns helps retention, does not end the drift, and is sensitive to "
        "the range",
        _laws,
    ),
    "finding 5": Finding(
        "L2 between adjacent states helps little, nor together with random depth", _l2
    ),
    "addition result": Finding(
        "with STARS the accuracy stays at 100 % at every number of turns", _methods
    ),
    "lambda": Finding(
        "states converge at every lambda, and the task is no longer learned from 0.15 on", _weights
    ),
    "ouro result": Finding(
        "past the trained depth SFT collapses; random loop and JSRR each slow that, both together "
        "most, and STARS is the best at 4 turns",
        _ouro,
    ),
}
