"""Settings beside another one, seed by seed."""

import copy
import math

import pytest
from studies_tiny import TINY

from stars_fast.base.errors import ConfigError
from studies.definition import parse_study
from studies.outcome import outcome_table
from studies.paired import differences, table

AGAINST = {"rival": "none"}


def runs(rival, gradient, ends, name="accuracy", **more):
    """A run a seed, with that value of the figure after 8 turns."""
    return [
        {
            "levels": {"rival": rival, "gradient": gradient},
            "label": f"{rival}, {gradient}",
            "seed": seed,
            "status": "done",
            name: {"2": 0.0, "8": end, "10": end} if end is None else {"10": end, "2": 1.0},
            **more,
        }
        for seed, end in ends.items()
    ]


def test_pairs_are_of_the_same_seed_and_of_the_same_other_levels():
    records = [
        *runs("none", "last", {0: 0.5, 1: 0.25, 2: 1.0}),
        *runs("none", "all", {0: 0.0, 1: 0.0}),
        *runs("penalty", "last", {2: 0.5, 1: 0.5, 0: 0.625, 3: 1.0}),
        *runs("penalty", "all", {1: 0.0, 2: 1.0}),  # one seed in common
        *runs("noise", "first", {0: 1.0, 1: 1.0}),  # nothing to put it beside
    ]
    (found,) = differences(records, AGAINST)
    levels = {"rival": "penalty", "gradient": "last"}
    assert found == (levels, "accuracy", 10, found.values, 2, 0)
    assert found.values == [0.125, 0.25, -0.5]  # seed by seed, after the most turns
    assert table([found], AGAINST) == [
        "Beside rival none, seed by seed: the difference in accuracy in points after 10 turns, "
        "median and range.",
        "",
        "| rival | gradient | difference | better on | seeds |",
        "|---|---|---|---|---|",
        "| penalty | last | +12.5 (-50.0 to +25.0) | 2 | 3 |",
    ]
    assert table([], AGAINST) == []


def test_a_run_that_is_not_done_is_no_half_of_a_pair():
    ends = {0: 0.5, 1: 0.5, 2: 0.5}
    records = runs("none", "last", ends) + runs("penalty", "last", ends)
    records[5] |= {"status": "failed"}
    (found,) = differences(records, AGAINST)
    assert len(found.values) == 2
    assert table([found], AGAINST)[-1].endswith("| 0 | 2, 1 failed |")
    records[1]["status"] = "missing"
    assert differences(records, AGAINST) == []


def test_all_are_compared_after_the_same_turns_by_the_same_figure():
    ends = {0: 0.5, 1: 0.5}
    records = runs("none", "last", ends, accuracy_2x={"10": 0.5}) + runs("noise", "last", ends)
    records += runs("penalty", "last", ends, accuracy_2x={"10": 0.5})
    for entry in records[2:4]:
        del entry["accuracy"]["10"]
    records[0]["levels"] = dict(reversed(records[0]["levels"].items()))
    found = differences(records, AGAINST)
    assert [(each.figure, each.turns) for each in found] == [("accuracy", 2)] * 2


def test_of_a_loss_the_smaller_is_better():
    loss = "validation_loss"
    records = runs("none", "last", {0: 2.0, 1: 2.0, 2: 2.0, 3: None}, loss)
    records += runs("penalty", "last", {0: 1.5, 1: 2.25, 2: None, 3: None}, loss)
    (found,) = differences(records, AGAINST)
    assert found.values == [-0.5, 0.25, math.inf, 0.0]
    assert found.better == 1
    words, *_, row = table([found], AGAINST)
    assert "in validation loss after 10 turns" in words
    assert row == "| penalty | last | +0.125 (-0.5 to +inf) | 1 | 4 |"


def test_samples_of_several_lengths_have_a_line_each():
    records = runs("none", "last", {0: 0.5, 1: 0.5}, accuracy_2x={"10": 0.25})
    records += runs("penalty", "last", {0: 0.5, 1: 1.0}, accuracy_2x={"10": 0.0})
    found = differences(records, AGAINST)
    assert [each.levels["length"] for each in found] == ["as trained", "2x"]
    assert [each.values for each in found] == [[0.0, 0.5], [-0.25, -0.25]]


def test_the_newest_checkpoints_are_compared_too_where_all_have_them():
    ends = {0: 0.5, 1: 0.5}
    records = runs("none", "last", ends, lately={"8": 0.25, "10": 0.5})
    records += runs("penalty", "last", ends, lately={"8": 0.5, "10": 0.25})
    (found,) = differences(records, AGAINST, "lately")
    assert (found.figure, found.turns, found.values, found.better) == ("lately", 10, [-0.25] * 2, 0)
    words, *_, row = table([found], AGAINST)
    assert words == (
        "Beside rival none, seed by seed: the difference in accuracy of the newest checkpoints "
        "(mean) in points after 10 turns, median and range."
    )
    assert row == "| penalty | last | -25.0 (-25.0 to -25.0) | 0 | 2 |"
    (usual,) = differences(records, AGAINST)
    assert (usual.figure, usual.values) == ("accuracy", [0.0, 0.0])
    study = parse_study("tiny", copy.deepcopy(TINY) | {"against": {"placement": "pre"}})
    for entry in records:
        entry["levels"] = {"placement": "pre" if entry["label"].startswith("none") else "post"}
    text = outcome_table(study, "quick", records, [], [])
    assert text.count("Beside placement pre") == 2
    assert "(mean) in points" in text
    del records[0]["lately"]
    assert differences(records, AGAINST, "lately") == []
    assert outcome_table(study, "quick", records, [], []).count("Beside placement pre") == 1


def test_the_table_of_a_study_has_them():
    mapping = copy.deepcopy(TINY) | {"against": {"placement": "pre"}, "findings": []}
    study = parse_study("tiny", mapping)
    assert study.against == {"placement": "pre"}
    levels = [{"placement": place, "norm": "RMSNorm"} for place in ("pre", "post")]
    records = [
        {"levels": of, "label": ", ".join(of.values()), "seed": seed, "status": "done",
         "accuracy": {"2": 0.5 * place}}
        for place, of in enumerate(levels)
        for seed in (0, 1)
    ]  # fmt: skip
    text = outcome_table(study, "quick", records, [], [])
    assert "| post | RMSNorm | +50.0 (+50.0 to +50.0) | 2 | 2 |" in text
    plain = parse_study("tiny", copy.deepcopy(TINY))
    assert "Beside" not in outcome_table(plain, "quick", records, [], [])


@pytest.mark.parametrize("wrong", [None, "pre", ["pre"]])
def test_what_is_no_mapping_is_named(wrong):
    with pytest.raises(ConfigError, match=r"study tiny: against: expected a mapping of factors"):
        parse_study("tiny", copy.deepcopy(TINY) | {"against": wrong})


@pytest.mark.parametrize("wrong", [{"placement": "sandwich"}, {"place": "pre"}])
def test_levels_that_no_run_has_are_named(wrong):
    with pytest.raises(ConfigError, match=r"study tiny: against: expected levels of a run, got \{"):
        parse_study("tiny", copy.deepcopy(TINY) | {"against": wrong})
