import math

import pytest

from stars_fast.training.run.collapse import COLLAPSE_STEPS, CollapseMonitor
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.trainer import train


def warnings(trace, monitor=None):
    monitor = monitor or CollapseMonitor(guessing=math.log(14))
    return [i for i, line in enumerate(trace) if monitor.check(*line)]


LEARNED = [(2.0 * 0.8**i, None) for i in range(20)]
FALLS = [(None, 0.8 * 0.5**i) for i in range(20)]


def rising(start):
    return [(start * 1.3**i, 0.8 * 0.5**i) for i in range(20)]


def test_a_loss_that_rises_while_the_jacobian_vanishes():
    trace = LEARNED + rising(LEARNED[-1][0])
    found = warnings(trace)
    assert len(found) == 1
    assert found[0] > len(LEARNED)
    monitor = CollapseMonitor(math.log(14))
    message = next(m for line in trace if (m := monitor.check(*line)))
    assert "rose from" in message
    assert "penalty.weight" in message


def test_a_loss_that_stays_near_guessing_with_the_penalty_gone():
    trace = [(1.3, 0.8 * 0.5**i) for i in range(30)]
    found = warnings(trace)
    assert len(found) == 1
    assert found[0] > COLLAPSE_STEPS


@pytest.mark.parametrize(
    "trace",
    [
        LEARNED + [(0.02, 0.8 * 0.5**i) for i in range(20)],  # contracts, stays learned
        LEARNED + [(0.02 * 1.3**i, 0.8) for i in range(20)],  # forgets, but not for the penalty
        [(2.6 * 0.8**i, 0.8 * 0.6**i) for i in range(20)],  # both fall from the first step on
        LEARNED + [(0.001 * (1 + i % 7), 0.8 * 0.5**i) for i in range(20)],  # noise near zero
        [(1.3, 0.5)] * 30,  # does not learn, but the penalty is there
        LEARNED,
        [(None, None)] * 5,
    ],
    ids=["contracts", "forgets", "both-fall", "noise", "no-learning", "no-penalty", "non-finite"],
)
def test_no_false_alarm(trace):
    assert warnings(trace) == []


def test_a_second_event_after_a_recovery():
    recovers = [(0.02, 0.8)] * 30
    trace = LEARNED + rising(0.02) + recovers + rising(0.02)
    assert len(warnings(trace)) == 2


def test_the_state_carries_over():
    trace = LEARNED + rising(0.02)
    (at,) = warnings(trace)
    first, second = CollapseMonitor(math.log(14)), CollapseMonitor(math.log(14))
    assert warnings(trace[: at - 1], first) == []
    second.load(first.state())
    assert warnings(trace[at - 1 :], second) == [1]


@pytest.mark.parametrize(("weight", "warns"), [(0.9, True), (0.05, False)])
def test_a_real_run(tiny, capsys, weight, warns):
    config = tiny(
        method="jsrr",
        penalty={"weight": weight},
        depth={"value": 2},
        optim={"lr": 0.02},
        train={"steps": 80, "log_every": 4},
    )
    folder = train(config).folder
    warned = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if "warning" in row]
    assert len(warned) == warns
    assert ("warning at step" in capsys.readouterr().err) is warns
