"""What a rival costs: the unit, the count, and that what is timed are the run's own steps."""

import pytest

from benchmarks.rivals_cost import Steps, measure
from stars_fast.base.errors import ConfigError
from stars_fast.training.scale.distributed import processes
from studies.definition import read_study, study_runs

BOTH = "*t, all turns, none, decay"
"""SFT and the exact penalty."""


@pytest.mark.slow
def test_costs_are_over_sft():
    rows = measure(2, BOTH)
    unit, exact = rows["sft, all turns, none, decay"], rows["exact, all turns, none, decay"]
    assert unit == {"counted": 1.0, "measured": 1.0}
    # One of the two steps has the penalty, a dual turn more; the depths are near SFT's.
    assert 1.1 < exact["counted"] < 2
    assert exact["measured"] != 1.0


def test_the_penalty_counts_where_it_is_on():
    (run,) = (
        run
        for run in study_runs(read_study("rivals"), "quick", "unused")
        if run.label == "exact, all turns, none, decay"
    )
    with processes("cpu") as world:
        steps = Steps(run.config, [100, 1300], world)
    assert [plan.weight for plan in steps.plans] == [0.0, run.config.penalty.weight]
    turns = [sum(plan.turns) for plan in steps.plans]
    without, dual = steps.counted[0] - turns[0], steps.counted[1] - turns[1]
    assert dual > without + 1  # a dual turn costs more than a plain one


def test_the_unit_is_needed():
    with pytest.raises(ConfigError, match="leaves out 'sft, all turns, none, decay'"):
        measure(1, "nothing*")
