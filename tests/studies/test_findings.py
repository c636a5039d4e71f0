"""Findings on curves that are made up: those of the paper's text agree, their opposites do not."""

import itertools
import math

import pytest

from studies.curves import distance, gather, mean_over
from studies.definition import read_study, study_names
from studies.findings import FINDINGS, Finding, judge_findings
from studies.verdicts import Part

TURNS = range(1, 101)
PLACEMENTS = ("pre", "post", "pre-sandwich", "post-sandwich")


def falling(to, peak=1.0, depth=4):
    """Accuracy that rises to `peak` at the trained depth and stays until it falls to 0 at `to`."""
    return {t: peak * min(1.0, t / depth) * (1.0 if t < to else 0.0) for t in TURNS}


def run(levels, accuracy, growth=1.0, radius=0.9, step=0.01, deepest=4):
    """The record of a finished run of 4 turns. Steps begin with half of the state and end with
    `step`; the radius begins with half of `radius`."""
    log_turns = {t: math.log(max(t, 4) / 4) for t in TURNS}
    return {
        "label": ", ".join(levels.values()),
        "levels": levels,
        "seed": 0,
        "status": "done",
        "depth": 4.0,
        "trained_turns": [deepest],
        "seconds": 10.0,
        "accuracy": accuracy,
        "rms": {t: growth ** (log / log_turns[100]) for t, log in log_turns.items()},
        "residual": {t: 0.5 if t < 100 else step for t in TURNS},
        "radius": {4: radius / 2, 16: 0.8 * radius, 64: radius},
        "contracting": {4: 1.0, 16: 1.0, 64: 0.75},
        "settled": {4: 1.0, 16: 1.0, 64: 0.5},
    }


def failed(done):
    """The record of that run if it had failed."""
    kept = ("label", "levels", "seed", "depth", "trained_turns")
    return {name: done[name] for name in kept} | {"status": "failed", "failed": "not finite"}


def verdict(name, records):
    (found,) = judge_findings([name], records)
    return found


def wrong(name, records):
    """The parts that do not agree, by number."""
    return [i for i, part in enumerate(verdict(name, records).parts) if not part.agrees]


def norms(fall, growth=None, step=None):
    """Four placements with two operators; `fall(placement, norm)` is where the accuracy ends."""
    growth, step = growth or GROWTH, step or STEP
    return [
        run({"placement": p, "norm": n}, falling(fall(p, n)), growth[p], step=step[p])
        for p in PLACEMENTS
        for n in ("LayerNorm", "RMSNorm")
    ]


ENDS = {"pre": 20, "pre-sandwich": 12, "post": 6, "post-sandwich": 7}
GROWTH = {"pre": 10.0, "pre-sandwich": 3.0, "post": 1.1, "post-sandwich": 1.0}
STEP = {"pre": 0.3, "pre-sandwich": 0.2, "post": 0.04, "post-sandwich": 0.01}


def test_finding_1():
    def placement_decides(p, n):
        return ENDS[p] + (n == "RMSNorm")

    def operator_decides(p, n):
        return 80 if n == "RMSNorm" else 6 + (p == "pre")

    def one_placement_differs(p, n):
        """Far from the others, but those are as near to each other as can be."""
        return (48 if p == "pre" else 6) * (2 if n == "RMSNorm" else 1)

    assert verdict("finding 1", norms(placement_decides)).agrees is True
    assert verdict("finding 1", norms(operator_decides)).agrees is False
    assert verdict("finding 1", norms(one_placement_differs)).agrees is False
    same = verdict("finding 1", norms(lambda p, n: 50))
    assert (same.agrees, same.parts[0].value) == (False, math.inf)
    (part,) = same.to_dict()["parts"]
    assert (part["value"], part["expected"], part["agrees"]) == (None, "at most 0.5", False)


@pytest.mark.parametrize(
    ("ends", "growth", "step", "expected"),
    [
        (ENDS, GROWTH, STEP, []),
        (ENDS, GROWTH | {"pre": 1.1}, STEP, [0]),
        (ENDS, GROWTH | {"pre-sandwich": 1.1}, STEP, [0]),
        (ENDS, GROWTH, STEP | {"post": 0.2}, [1]),
        (ENDS, GROWTH, STEP | {"post-sandwich": 0.2}, [1]),
        ({"pre": 6, "pre-sandwich": 6, "post": 20, "post-sandwich": 20}, GROWTH, STEP, [2]),
        (ENDS | {"post": 1000}, GROWTH, STEP, [3]),
    ],
)
def test_finding_2(ends, growth, step, expected):
    records = norms(lambda p, n: ends[p], growth, step)
    assert wrong("finding 2", records) == expected
    assert verdict("finding 2", records).agrees is (not expected)


def layers(end):
    names = ("only-recurrent", "with-prelude", "with-coda", "with-both")
    return [
        run({"placement": p, "layers": name}, falling(end(p, name)))
        for p in ("pre-sandwich", "post-sandwich")
        for name in names
    ]


def test_finding_3():
    small = layers(lambda p, name: (30 if p == "pre-sandwich" else 6) + len(name) % 2)
    assert verdict("finding 3", small).agrees is True
    large = layers(lambda p, name: 90 if name == "with-both" else 6 + (p == "pre-sandwich"))
    assert verdict("finding 3", large).agrees is False


def laws(ends, growth=GROWTH, peak=1.0, fixed_peak=1.0):
    """Laws of 4 turns on average, whose accuracy ends at `ends(placement)`, against a fixed depth
    that ends after 8."""
    found = []
    for placement in PLACEMENTS:
        grown = growth.get(placement, 1.0)
        levels = {"placement": placement, "law": "fixed 4"}
        found.append(run(levels, falling(8, fixed_peak), grown))
        for law, end in enumerate(ends(placement)):
            levels = {"placement": placement, "law": f"law {law}"}
            found.append(run(levels, falling(end, peak), grown, deepest=20))
    return found


def alike(*ends):
    return lambda placement: ends


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (laws(alike(40, 80)), []),
        (laws(lambda placement: (40, 80) if placement == "post" else (40, 41)), []),
        (laws(alike(9, 9)), [0, 2]),
        (laws(lambda placement: (80, 9) if placement == "pre" else (9, 9)), [0]),
        (laws(alike(40, 80), growth={"pre": 2.5, "pre-sandwich": 1.2}), [1]),
        (laws(alike(60, 62)), [2]),
    ],
)
def test_finding_4(records, expected):
    assert wrong("finding 4", records) == expected
    assert verdict("finding 4", records).parts


def test_finding_4_counts_the_laws_that_learn_nothing_in_the_sensitivity_alone():
    learned, nothing = laws(alike(40, 40)), laws(alike(40, 40), peak=0.1)
    mixed = [nothing[i] if i in (2, 5) else each for i, each in enumerate(learned)]
    found = verdict("finding 4", mixed)
    assert "6 of 8" in found.parts[0].what
    assert [part.agrees for part in found.parts] == [True, True, True]
    assert "needs laws that learn" in verdict("finding 4", nothing).why_not


def test_finding_4_counts_a_law_whose_training_collapsed():
    records = laws(alike(40, 40))
    assert wrong("finding 4", records) == [2]
    records[2] = failed(records[2])
    found = verdict("finding 4", records)
    assert "7 of 8" in found.parts[0].what
    assert [part.agrees for part in found.parts] == [True, True, True]


def test_two_collapsed_seeds_of_three_outweigh_the_one_that_learned():
    records = [each | {"seed": seed} for seed in range(3) for each in laws(alike(40, 40))]
    for index in (2, 2 + len(records) // 3):
        records[index] = failed(records[index])
    found = verdict("finding 4", records)
    assert "7 of 8" in found.parts[0].what
    assert [part.agrees for part in found.parts] == [True, True, True]


def test_finding_4_needs_several_laws():
    assert "two laws or more besides fixed 4 at pre, pre-sandwich, post" in (
        verdict("finding 4", laws(alike(40))).why_not
    )


def test_finding_4_needs_a_fixed_depth_that_has_learned():
    records = laws(alike(40, 80), fixed_peak=0.0)
    assert "pre, fixed 4 has not learned the task" in verdict("finding 4", records).why_not
    records = laws(alike(40, 80))
    records[0] = failed(records[0])
    assert "pre, fixed 4 has not learned the task" in verdict("finding 4", records).why_not


def l2(fixed, random, peak=1.0):
    """Where the accuracy with L2 ends, at a fixed and at a random depth; of both placements, or of
    the first and the second."""
    ends = {("fixed", "none"): (10, 10), ("random", "none"): (50, 50)}
    ends |= {("fixed", "L2"): fixed, ("random", "L2"): random}
    return [
        run({"placement": p, "depth": d, "penalty": k}, falling(end[i], peak))
        for i, p in enumerate(("pre-sandwich", "post-sandwich"))
        for (d, k), end in ends.items()
    ]


@pytest.mark.parametrize(
    ("fixed", "random", "expected"),
    [
        ((10, 10), (30, 30), []),
        ((40, 10), (50, 50), [0]),
        ((10, 40), (50, 50), [0]),
        ((10, 10), (90, 30), [1]),
        ((10, 10), (30, 90), [1]),
    ],
)
def test_finding_5(fixed, random, expected):
    assert wrong("finding 5", l2(fixed, random)) == expected
    assert verdict("finding 5", l2(fixed, random)).parts


def test_finding_5_is_not_judged_where_nothing_is_learned():
    found = verdict("finding 5", l2((10, 10), (50, 50), peak=0.0))
    assert "pre-sandwich, fixed, none has not learned the task" in found.why_not
    # With L2 nothing may be learned: it helps little then, too.
    records = [
        each | {"accuracy": falling(10, 0.0)} if each["levels"]["penalty"] == "L2" else each
        for each in l2((10, 10), (50, 50))
    ]
    assert verdict("finding 5", records).agrees is True


def methods(stars, loop=30, radius=0.8):
    curves = {"sft": falling(6), "random-loop": falling(loop), "jsrr": falling(8), "stars": stars}
    return [run({"method": m}, curve, radius=radius) for m, curve in curves.items()]


def test_addition_result():
    always = falling(1000)
    assert verdict("addition result", methods(always)).agrees is True
    assert wrong("addition result", methods(falling(50))) == [0]
    assert wrong("addition result", methods(always | {20: 0.5})) == [0]
    assert wrong("addition result", methods(always | {3: 0.5})) == []
    assert wrong("addition result", methods(falling(50), loop=90)) == [0, 1]
    assert wrong("addition result", methods(always, radius=1.0)) == [2]
    (*_, part) = verdict("addition result", methods(always)).parts
    assert "at 64 turns, mean of the samples (75% of them below 1, 50% settled)" in part.what


def weights(peaks, radius=0.9):
    return [
        run({"lambda": name}, falling(1000, peak), radius=radius if float(name) else 1.3)
        for name, peak in zip(("0", "0.05", "0.1", "0.15", "0.2"), peaks, strict=True)
    ]


def test_lambda():
    assert verdict("lambda", weights([1, 1, 1, 0.7, 0.3])).agrees is True
    assert wrong("lambda", weights([1, 1, 0.6, 0.3, 0.3])) == [0]
    assert wrong("lambda", weights([1, 1, 1, 1, 0.95])) == [1]
    assert wrong("lambda", weights([1, 1, 1, 0.95, 0.3])) == [1]
    assert wrong("lambda", weights([1, 1, 1, 0.3, 0.95])) == [1]
    assert wrong("lambda", weights([1, 1, 1, 0.7, 0.3], radius=1.1)) == [2]
    one = weights([1, 1, 1, 0.7, 0.3])
    one[3] = run(one[3]["levels"], falling(1000, 0.7), radius=1.1)
    assert wrong("lambda", one) == [2]
    assert "with a penalty (0.15: 75% of them" in verdict("lambda", one).parts[2].what


def ouro(rises, at_four=(0.6, 0.7, 0.6, 0.6)):
    names = ("sft", "random-loop", "jsrr", "stars")
    return [
        {
            "label": name,
            "levels": {"method": name},
            "seed": 0,
            "status": "done",
            "depth": 4.0,
            "trained_turns": [4],
            "seconds": 1.0,
            "validation_loss": {"4": low, "8": None if low is None else low + rise},
            "gsm8k/exact_match": {"4": 0.5, "8": 0.5},
        }
        for name, rise, low in zip(names, rises, at_four, strict=True)
    ]


def test_ouro_result():
    assert verdict("ouro result", ouro([2.0, 0.5, 1.5, 0.4])).agrees is True
    expected = {
        0: ouro([0.05, 0.02, 0.04, 0.01]),
        1: ouro([2.0, 0.5, 2.5, 0.4]),
        2: ouro([2.0, 0.5, 1.5, 0.6]),
        3: ouro([2.0, 0.5, 1.5, 0.4], (0.9, 0.9, 0.6, 0.8)),
    }
    for part, records in expected.items():
        assert wrong("ouro result", records) == [part]


def test_ouro_result_without_the_losses_it_needs():
    records = ouro([2.0, 0.5, 1.5, 0.4])
    assert "eval.turns lacks 8" in verdict("ouro result", [
        each | {"validation_loss": {"4": 0.6}} for each in records
    ]).why_not  # fmt: skip
    diverged = ouro([2.0, 0.5, 1.5, 0.4], (0.6, 0.7, None, 0.6))
    assert "at 4 turns is not finite" in verdict("ouro result", diverged).why_not
    del records[2]["validation_loss"]
    assert "no validation loss of all runs" in verdict("ouro result", records).why_not


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_without_its_runs_is_not_judged(name):
    levels = dict.fromkeys(("placement", "norm", "layers", "law", "depth", "penalty"), "x")
    one = [run(levels | {"method": "sft", "lambda": "0"}, falling(8))]
    for records in ([], [one[0] | {"status": "missing"}], one):
        found = verdict(name, records)
        assert found.agrees is None
        assert found.words == "not judged"
        assert found.why_not
        assert "could not be computed" not in found.why_not
        assert found.to_dict()["why_not"] == found.why_not


WHOLE = {
    "finding 1": norms(lambda p, n: ENDS[p]),
    "finding 2": norms(lambda p, n: ENDS[p]),
    "finding 3": layers(lambda p, name: 9),
    "finding 4": laws(alike(40, 80)),
    "finding 5": l2((10, 10), (50, 50)),
    "addition result": methods(falling(1000)),
    "lambda": weights([1, 1, 1, 0.7, 0.3]),
    "ouro result": ouro([2.0, 0.5, 1.5, 0.4]),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_is_judged_by_a_whole_study_alone(name):
    whole = WHOLE[name]
    first, last = whole[0], whole[-1]
    assert verdict(name, whole).parts
    internal = [e for e in whole if e["levels"].get("placement", "pre").startswith("pre")]
    part = [each for each in internal if each is not last]  # as if the study had no more
    assert "no finished run of" in verdict(name, part).why_not
    fewer = "settings have fewer runs than others, such as"
    assert f"1 of {len(whole)} {fewer} {last['label']}" in (
        verdict(name, [*whole[:-1], last | {"status": "missing"}]).why_not
    )
    assert fewer in verdict(name, [*whole, first | {"seed": 1}]).why_not
    assert verdict(name, [*whole, first | {"seed": 1, "status": "missing"}]).parts


@pytest.mark.parametrize("name", sorted({*FINDINGS} - {"finding 4"}))
def test_a_failed_run_keeps_a_finding_from_being_judged(name):
    first, *rest = WHOLE[name]
    assert verdict(name, [failed(first), *rest]).why_not == f"failed runs of {first['label']}"
    seeds = [*WHOLE[name], *(each | {"seed": 1} for each in rest), failed(first | {"seed": 1})]
    assert verdict(name, seeds).why_not == f"failed runs of {first['label']}"


def test_a_run_that_has_not_learned_the_task_keeps_the_comparison_from_being_judged():
    records = norms(lambda p, n: ENDS[p])
    records[3] = run(records[3]["levels"], falling(6, peak=0.3))
    assert "post, RMSNorm has not learned the task" in verdict("finding 1", records).why_not


def test_a_finding_that_breaks_leaves_the_others(monkeypatch):
    monkeypatch.setitem(FINDINGS, "finding 2", Finding("broken", lambda results: 1 / 0))
    broken, good = judge_findings(["finding 2", "finding 1"], WHOLE["finding 1"])
    assert "could not be computed: ZeroDivisionError" in broken.why_not
    assert broken.words == "not judged"
    assert good.parts


def test_every_finding_belongs_to_a_study():
    used = [finding for name in study_names() for finding in read_study(name).findings]
    assert sorted(used) == sorted(FINDINGS)


def test_a_part_says_what_was_expected():
    assert str(Part("loss", 0.123456, "at most", 0.2)) == (
        "loss: 0.1235, at most 0.2 expected: agrees"
    )
    assert not Part("loss", 0.2, "below", 0.2).agrees
    assert not Part("loss", math.nan, "at least", 0.2).agrees
    assert str(Part("radius", 1.002, "below", 1.0)) == (
        "radius: 1.002, below 1 expected: does not agree"
    )


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


def test_curves_are_of_the_figures_that_all_runs_have():
    records = [entry(seed, 0.5) | {"other": {"1": 1.0}} for seed in (0, 1)]
    records.append(entry(0, 0.5) | {"label": "c", "levels": {"x": "c"}})
    assert [set(found.median) for found in gather(records)] == 2 * [{"accuracy", "rms"}]
    bare = {name: records[0][name] for name in ("label", "levels", "status")}
    assert gather([*records, bare]) == []
    assert gather([]) == []


def test_failed_runs_enter_the_curves_where_they_are_asked_for_as_wrong_ones():
    records = [entry(0, 1.0), failed(entry(1, 1.0)), failed(entry(0, 1.0) | {"label": "all"})]
    (plain,) = gather(records)
    assert (plain.seeds, plain.median["accuracy"][2]) == (1, 1.0)
    some, every = gather(records, failed_as_wrong=True)
    assert (some.seeds, some.median["accuracy"][2], some.low["accuracy"][2]) == (2, 0.5, 0.0)
    assert some.median["rms"] == plain.median["rms"]
    assert some.seconds == plain.seconds
    assert (every.seeds, every.median) == (1, {"accuracy": {1: 0.0, 2: 0.0}})
