"""Findings on curves that are made up: those of the paper's text agree, their opposites do not."""

import itertools
import math

import pytest

from stars_fast.studies.curves import Result, distance, gather, mean_over
from stars_fast.studies.definition import read_study, study_names
from stars_fast.studies.findings import FINDINGS, Part, judge_findings

TURNS = range(1, 101)
PLACEMENTS = ("pre", "post", "pre-sandwich", "post-sandwich")


def falling(to, peak=1.0, depth=4):
    """Accuracy that rises to `peak` at the trained depth and stays until it falls to 0 at `to`."""
    return {t: peak * min(1.0, t / depth) * (1.0 if t < to else 0.0) for t in TURNS}


def result(levels, accuracy, growth=1.0, radius=0.9, depth=4, deepest=4):
    log_turns = {t: math.log(max(t, depth) / depth) for t in TURNS}
    curves = {
        "accuracy": accuracy,
        "rms": {t: growth ** (log / log_turns[100]) for t, log in log_turns.items()},
        "radius": {4: radius, 16: radius, 64: radius},
    }
    return Result(levels, 1, depth, deepest, 10.0, curves, curves, curves)


def verdict(name, results):
    (found,) = judge_findings([name], results)
    return found


def norms(fall, growth):
    """Four placements with two operators; `fall(placement, norm)` is where the accuracy ends."""
    return [
        result({"placement": p, "norm": n}, falling(fall(p, n)), growth(p))
        for p in PLACEMENTS
        for n in ("LayerNorm", "RMSNorm")
    ]


ENDS = {"pre": 20, "pre-sandwich": 12, "post": 6, "post-sandwich": 7}


def grows(placement):
    return 10.0 if placement.startswith("pre") else 1.1


def test_finding_1():
    def placement_decides(p, n):
        return ENDS[p] + (n == "RMSNorm")

    def operator_decides(p, n):
        return 80 if n == "RMSNorm" else 6 + (p == "pre")

    assert verdict("finding 1", norms(placement_decides, grows)).agrees is True
    assert verdict("finding 1", norms(operator_decides, grows)).agrees is False
    same = verdict("finding 1", norms(lambda p, n: 50, grows))
    assert (same.agrees, same.parts[0].value) == (False, math.inf)
    (part,) = same.to_dict()["parts"]
    assert (part["value"], part["expected"], part["agrees"]) == (None, "at most 0.5", False)


@pytest.mark.parametrize(
    ("ends", "growth", "wrong"),
    [
        (ENDS, grows, []),
        (ENDS, lambda p: 1.1, [0]),
        (ENDS, lambda p: 10.0, [1]),
        ({"pre": 6, "pre-sandwich": 6, "post": 20, "post-sandwich": 20}, grows, [2]),
        (ENDS | {"post": 1000}, grows, [3]),
    ],
)
def test_finding_2(ends, growth, wrong):
    found = verdict("finding 2", norms(lambda p, n: ends[p], growth))
    assert [i for i, part in enumerate(found.parts) if not part.agrees] == wrong
    assert found.agrees is (not wrong)


def layers(end):
    names = ("only-recurrent", "with-prelude", "with-coda", "with-both")
    return [
        result({"placement": p, "layers": name}, falling(end(p, name)))
        for p in ("pre-sandwich", "post-sandwich")
        for name in names
    ]


def test_finding_3():
    small = layers(lambda p, name: (30 if p == "pre-sandwich" else 6) + len(name) % 2)
    assert verdict("finding 3", small).agrees is True
    large = layers(lambda p, name: 90 if name == "with-both" else 6 + (p == "pre-sandwich"))
    assert verdict("finding 3", large).agrees is False


def laws(ends, growth=10.0, peak=1.0):
    """Laws of 4 turns on average, whose accuracy ends at `ends`, against a fixed depth that ends
    after 8."""
    found = []
    for placement in ("pre-sandwich", "post-sandwich"):
        grown = growth if placement == "pre-sandwich" else 1.0
        found.append(result({"placement": placement, "law": "fixed 4"}, falling(8), grown))
        for law, end in enumerate(ends):
            levels = {"placement": placement, "law": f"law {law}"}
            found.append(result(levels, falling(end, peak), grown, deepest=20))
    return found


@pytest.mark.parametrize(
    ("results", "wrong"),
    [
        (laws([40, 80]), []),
        (laws([9, 9]), [0, 2]),
        (laws([40, 80], growth=1.2), [1]),
        (laws([60, 62]), [2]),
    ],
)
def test_finding_4(results, wrong):
    found = verdict("finding 4", results)
    assert [i for i, part in enumerate(found.parts) if not part.agrees] == wrong


def test_finding_4_counts_the_laws_that_learn_nothing_in_the_sensitivity_alone():
    learned, nothing = laws([40, 40]), laws([40, 40], peak=0.1)
    mixed = [nothing[i] if i in (2, 5) else each for i, each in enumerate(learned)]
    found = verdict("finding 4", mixed)
    assert "2 of 4" in found.parts[0].what
    assert [part.agrees for part in found.parts] == [True, True, True]
    assert "needs laws that learn" in verdict("finding 4", nothing).why_not


def l2(fixed, random):
    ends = {("fixed", "none"): 10, ("fixed", "L2"): fixed, ("random", "none"): 50}
    ends["random", "L2"] = random
    return [
        result({"placement": p, "depth": d, "penalty": k}, falling(end))
        for p in ("pre-sandwich", "post-sandwich")
        for (d, k), end in ends.items()
    ]


def test_finding_5():
    assert [part.agrees for part in verdict("finding 5", l2(10, 30)).parts] == [True, True]
    assert [part.agrees for part in verdict("finding 5", l2(40, 50)).parts] == [False, True]
    assert [part.agrees for part in verdict("finding 5", l2(10, 90)).parts] == [True, False]


def methods(stars, loop=30, radius=0.8):
    ends = {"sft": 6, "random-loop": loop, "jsrr": 8, "stars": stars}
    return [result({"method": m}, falling(end), radius=radius) for m, end in ends.items()]


def test_addition_result():
    assert verdict("addition result", methods(1000)).agrees is True
    assert [p.agrees for p in verdict("addition result", methods(50)).parts] == [False, True, True]
    assert [p.agrees for p in verdict("addition result", methods(50, 90)).parts][1] is False
    assert [p.agrees for p in verdict("addition result", methods(1000, radius=1.0)).parts][2] is (
        False
    )


def weights(peaks, radius=0.9):
    return [
        result({"lambda": name}, falling(1000, peak), radius=radius if float(name) else 1.3)
        for name, peak in zip(("0", "0.05", "0.1", "0.15", "0.2"), peaks, strict=True)
    ]


def test_lambda():
    assert verdict("lambda", weights([1, 1, 1, 0.7, 0.3])).agrees is True
    found = [
        [part.agrees for part in verdict("lambda", each).parts]
        for each in (
            weights([1, 1, 0.6, 0.3, 0.3]),
            weights([1, 1, 1, 1, 0.95]),
            weights([1, 1, 1, 0.7, 0.3], radius=1.1),
        )
    ]
    assert found == [[False, True, True], [True, False, True], [True, True, False]]


def ouro(rises, at_four=(0.6, 0.7, 0.6, 0.6)):
    names = ("sft", "random-loop", "jsrr", "stars")
    return [
        Result({"method": name}, 1, 4, 4, 1.0, *3 * [{"validation_loss": {4: low, 8: low + rise}}])
        for name, rise, low in zip(names, rises, at_four, strict=True)
    ]


def test_ouro_result():
    assert verdict("ouro result", ouro([2.0, 0.5, 1.5, 0.4])).agrees is True
    wrong = {
        0: ouro([0.05, 0.02, 0.04, 0.01]),
        1: ouro([2.0, 0.5, 2.5, 0.4]),
        2: ouro([2.0, 0.5, 1.5, 0.6]),
        3: ouro([2.0, 0.5, 1.5, 0.4], (0.6, 0.7, 0.6, 0.8)),
    }
    for part, results in wrong.items():
        found = verdict("ouro result", results).parts
        assert [i for i, each in enumerate(found) if not each.agrees] == [part]


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_without_its_runs_is_not_judged(name):
    levels = dict.fromkeys(("placement", "norm", "layers", "law", "depth", "penalty"), "x")
    one = [result(levels | {"method": "sft", "lambda": "0"}, falling(8))]
    for results in ([], one):
        found = verdict(name, results)
        assert found.agrees is None
        assert found.words == "not judged"
        assert found.why_not
        assert found.to_dict()["why_not"] == found.why_not


def test_a_run_that_has_not_learned_the_task_keeps_the_comparison_from_being_judged():
    results = norms(lambda p, n: ENDS[p], grows)
    results[3] = result(results[3].levels, falling(6, peak=0.3))
    assert "post, RMSNorm has not learned the task" in verdict("finding 1", results).why_not


def test_every_finding_belongs_to_a_study():
    used = [finding for name in study_names() for finding in read_study(name).findings]
    assert sorted(used) == sorted(FINDINGS)


def test_a_part_says_what_was_expected():
    assert str(Part("loss", 0.123456, "at most", 0.2)) == (
        "loss: 0.123, at most 0.2 expected: agrees"
    )
    assert not Part("loss", 0.2, "below", 0.2).agrees
    assert not Part("loss", math.nan, "at least", 0.2).agrees


def test_means_over_turns_are_even_on_a_logarithmic_axis():
    half = {t: float(t > 10) for t in range(1, 1001)}
    assert mean_over(half, 1) == pytest.approx(2 / 3, abs=0.06)  # 10 to 1000 of 1 to 1000
    assert mean_over({4: 0.2, 1: 9.0}, 2) == pytest.approx(0.2)
    assert distance({4: 0.2, 8: 0.4}, {4: 0.3, 8: 0.1}, 4) == pytest.approx((0.1 * 2 + 0.3) / 3)


def entry(seed, accuracy, status="done"):
    return {
        "label": "a, b",
        "levels": {"x": "a", "y": "b"},
        "overrides": {"model.placement": "pre"},
        "machine": {"torch": "2"},
        "status": status,
        "seed": seed,
        "depth": 5.12,
        "trained_turns": [2, 14],
        "seconds": 10.0 + seed,
        "accuracy": {"1": accuracy, "2": 1.0},
        "rms": {"1": 1.0, "2": None if seed else 2.0},
    }


def test_curves_are_medians_over_the_seeds():
    records = [entry(seed, 0.1 * seed) for seed in (0, 1, 4)] + [entry(9, 1.0, "missing")]
    (found,) = gather(records)
    assert (found.label, found.seeds, found.depth, found.deepest) == ("a, b", 3, 5, 14)
    assert found.seconds == 11.0
    assert found.median["accuracy"] == {1: pytest.approx(0.1), 2: 1.0}
    assert (found.low["accuracy"][1], found.high["accuracy"][1]) == (0.0, 0.4)
    assert found.median["rms"] == {1: 1.0, 2: math.inf}
    assert set(itertools.chain(found.median, found.low)) == {"accuracy", "rms"}
