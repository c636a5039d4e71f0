import random

import pytest

from stars_fast.models.families.looped_lm import LoopedLoop
from stars_fast.models.looped import LoopedLM
from stars_fast.training.run.progress import banner, duration
from stars_fast.training.step.cost import (
    RemainingTime,
    expected_costs,
    relative_cost,
    step_cost,
)
from stars_fast.training.step.penalties.jacobian import DUAL_TURN


def test_cost_of_a_step(tiny):
    assert step_cost(tiny(method="sft"), 4, 0, outside=0.5) == 4.5
    assert step_cost(tiny(method="jsrr"), 4, 0, outside=0.5) == 4.5 + DUAL_TURN
    late = tiny(method="jsrr", penalty={"start_step": 3})
    assert step_cost(late, 4, 2, outside=0.5) == 4.5
    truncated = tiny(method="sft", train={"backprop_turns": 1})
    assert step_cost(truncated, 4, 0, outside=0.5) == 1 + 3 / 3 + 0.5
    some = tiny(method="jsrr", penalty={"fraction": 0.25})
    assert step_cost(some, 4, 0, outside=0.5) == 4.5 + DUAL_TURN / 4
    shared = tiny(method="jsrr", penalty={"at": "last", "detach": False})
    assert step_cost(shared, 4, 0, outside=0.5) == 3.5 + DUAL_TURN


def test_a_curriculum_costs_what_its_depths_do(tiny):
    config = tiny(
        method="random-loop",
        depth={"curriculum_steps": 50, "curriculum_start": 2.0},
        train={"steps": 100},
    )
    expected = expected_costs(config, outside=0.0)
    means = [sum(turns * p for turns, p in config.depth.chances(step)) for step in range(100)]
    assert expected == pytest.approx(means)
    assert expected[0] < 2.2 < expected[50] == pytest.approx(config.depth.mean())


def test_relative_cost_of_the_methods_is_near_the_reported_one(tiny):
    """The paper reports 1.53 for JSRR at 4 turns; the head is small beside its 24 layers."""
    jsrr = tiny(method="jsrr", depth={"value": 4})
    assert relative_cost(jsrr, outside=0.08) == pytest.approx(1.53, abs=0.03)
    assert relative_cost(tiny(method="sft", depth={"value": 4}), outside=0.08) == pytest.approx(1.0)


def test_outside_of_the_block_counts_by_its_weights(tiny):
    config = tiny(model={"n_layers": 2, "n_prelude": 1})
    loop = LoopedLoop(LoopedLM(config.model))
    assert loop.outside_block(supervised=0.0) == 0.5
    head = loop.outside_block(supervised=0.5) - 0.5
    assert head == pytest.approx(0.5 * 14 * 16 / (2 * (4 * 16 * 16 + 2 * 16 * 32)))


@pytest.mark.parametrize("start_step", [0, 100])
def test_remaining_time_is_right_within_a_fifth_after_ten_steps(tiny, start_step):
    config = tiny(train={"steps": 200}, penalty={"start_step": start_step})
    law = config.depth
    rng = random.Random(0)

    def seconds(step, turns):
        return 0.1 * step_cost(config, turns, step, outside=1.0) * rng.uniform(0.95, 1.05)

    turns = [law.sample(0, step) for step in range(200)]
    times = [seconds(step, turns[step]) for step in range(200)]
    remaining = RemainingTime(config, outside=1.0)
    remaining.add(0, turns[0], 100 * times[0])  # the first step warms up
    for step in range(1, 10):
        remaining.add(step, turns[step], times[step])
    assert remaining.after_step(9) == pytest.approx(sum(times[10:]), rel=0.2)
    for step in range(10, 200):
        remaining.add(step, turns[step], times[step])
    assert remaining.after_step(199) == 0.0


def test_durations_and_banner_read_well(tiny):
    assert [duration(s) for s in (3.4, 65, 3600 * 2 + 61)] == ["3s", "1m05s", "2h01m"]
    config = tiny(penalty={"start_step": 3})
    line = banner(
        config, "LoopedLM", LoopedLM(config.model), "16 1-digit sums = 96 tokens", outside=0.1
    )
    assert "\n" not in line
    for part in ("stars", "16 1-digit sums = 96 tokens", "mean 2.9", "from step 3", "x SFT at 4"):
        assert part in line
