"""Which runs a study's table says are not done: each in its line, many by their first level."""

import pytest

from studies.outcome import MANY, _left_out


def entries(names, seeds, **more):
    return [
        {"levels": dict(enumerate(name)), "seed": seed, "status": "missing", **more}
        for seed in seeds
        for name in names
    ]


def test_a_few_have_a_line_each():
    lines = _left_out(
        [
            *entries([("pre", "a")], [0, 2]),
            *entries([("post", "a")], [0], status="failed", failed="no memory"),
            *entries([("post", "b")], [0], status="done"),
        ]
    )
    assert lines == [
        "1 of 4 runs are done. The others:",
        "",
        "- pre, a, seeds 0, 2: missing",
        "- post, a, seed 0: failed: no memory",
    ]
    assert _left_out(entries([("a",)], [0], status="done")) == []


@pytest.mark.parametrize("more", [0, 1])
def test_many_have_a_line_for_each_level_of_the_first_factor(more):
    names = [("pre", str(i)) for i in range(MANY - 1 + more)]
    lines = _left_out([*entries(names, [0, 1]), *entries([("post", "a")], [1])])[2:]
    if not more:
        assert len(lines) == MANY
        return
    inside = "; ".join(map(str, range(MANY)))
    assert lines == [f"- pre, seeds 0, 1: missing: {inside}", "- post, seed 1: missing: a"]


def test_many_of_one_factor_keep_their_lines():
    names = [(str(i),) for i in range(MANY + 1)]
    assert _left_out(entries(names, [0]))[2:] == [
        f"- {i}, seed 0: missing" for i in range(MANY + 1)
    ]
