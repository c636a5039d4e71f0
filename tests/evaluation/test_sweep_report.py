"""The table and the figures of a sweep."""

import pytest

from stars_fast.base.plots import accuracy_against_compute
from stars_fast.evaluation import report
from stars_fast.evaluation.report import Result, labels_of, markdown_table


def result(task, turns, accuracy, tol=None, stderr=0.01, mean_turns=None, model="m", n=10):
    return Result(
        model, task, turns, tol, "exact_match,none", accuracy, stderr, n, 10, {}, {}, 5.0, 0.0,
        mean_turns,
    )  # fmt: skip


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_average_counts_each_task_once_and_is_left_out_where_one_is_missing():
    found = [
        result("a", 2, 0.5, stderr=0.03), result("b", 2, 0.25, stderr=0.04, n=4),
        result("a", 4, 1.0),
        result("a", 8, 0.5), result("b", 8, 0.5, stderr=None, n=4),
    ]  # fmt: skip
    heads, _, *lines = cells(markdown_table(found))
    assert heads == ["model", "turns", "a (n = 10)", "b (n = 4 of 10)", "average"]
    assert lines == [
        ["m", "2", "50.00 ± 3.00", "25.00 ± 4.00", "37.50 ± 2.50"],
        ["m", "4", "100.00 ± 1.00", "-", "-"],
        ["m", "8", "50.00 ± 1.00", "50.00", "50.00"],
    ]


def test_lines_of_adaptive_depth_are_few_and_long():
    found = [result("a", 8, 0.8, mean_turns=8.0)]
    found += [result("a", 8, 0.7, tol, mean_turns=mean) for tol, mean in ((0.1, 3.0), (0.01, 6.0))]
    rows = report._rows(found)
    assert report._compute_curves(rows, ["a"], name_models=False) == {
        "all turns": [(8.0, 0.8)],
        "at most 8 turns": [(3.0, 0.7), (6.0, 0.7)],
    }
    found = [result("a", t, 0.1 * t, tol, mean_turns=t / 2) for t in (2, 4) for tol in (0.1,)]
    rows = report._rows(found)
    assert report._compute_curves(rows, ["a"], name_models=True) == {
        "m, tol 0.1": [(1.0, 0.2), (2.0, 0.4)]
    }


def test_labels():
    assert labels_of({"a/x": "x", "b/x": "x", "c": "y"}) == {"a/x": "a/x", "b/x": "b/x", "c": "y"}


@pytest.mark.parametrize(
    "points", [{"one": [(3.2, 0.5), (3.9, 0.7)], "two": [(8, 1.0)]}, {"one": [(4, 0.0)]}]
)
def test_the_figure_against_compute(points, tmp_path):
    accuracy_against_compute(points, tmp_path / "a.png", title="All")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ({}, "points: expected"),
        ({"a": []}, "points: expected"),
        ({"a": [(1.0, 1.5)]}, r"accuracy: expected a value in \[0, 1\], got 1.5 for a"),
        ({"a": [(0.0, 0.5)]}, "mean turns: expected a positive number, got 0.0 for a"),
    ],
)
def test_what_can_not_be_drawn_is_named(points, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        accuracy_against_compute(points, tmp_path / "a.png")
