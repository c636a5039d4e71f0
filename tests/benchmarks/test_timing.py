"""Turns, ratios and memory of what is timed."""

import pytest

from benchmarks.timing import in_its_own_process, interleaved, ratio


def test_the_ways_take_turns_and_the_first_round_does_not_count():
    called = []
    ways = {name: lambda name=name: called.append(name) for name in "abc"}
    clock = iter(range(100))

    def one_by_one(run):
        run()
        return float(next(clock))

    times = interleaved(ways, 2, "cpu", one_by_one)
    assert "".join(called) == "abc" + "bca" + "cab"
    assert times == {"a": [5.0, 7.0], "b": [3.0, 8.0], "c": [4.0, 6.0]}


def test_a_machine_that_slows_down_does_not_change_a_ratio():
    unit = [1.0, 1.0, 4.0, 4.0, 4.0]
    way = [2.0, 2.0, 8.0, 8.0, 99.0]
    assert ratio(way, unit) == 2.0
    drifting = [3.0, 6.0, 12.0, 24.0], [1.0, 2.0, 4.0, 8.0]
    assert ratio(*drifting) == 3.0
    late = [1.0, 1.0, 4.0], [1.0, 4.0, 4.0]  # medians alone would say 0.25
    assert ratio(*late) == 1.0
    with pytest.raises(ValueError, match="zip"):
        ratio(way[:2], unit)


def test_a_process_of_its_own_answers_or_says_why():
    assert in_its_own_process("json:dumps", obj={"a": 1}) == '{"a": 1}'
    with pytest.raises(RuntimeError, match="AttributeError"):
        in_its_own_process("json:nothing")
