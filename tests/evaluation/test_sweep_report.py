"""The table and the figures of a sweep."""

import math
from dataclasses import replace

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
    costs = ["KV/token", "KV at context", "tokens/s"]
    assert heads == ["model", "turns", "a (n = 10)", "b (n = 4 of 10)", "average", *costs]
    assert all(line[5:] == ["-"] * 3 for line in lines)
    assert [line[:5] for line in lines] == [
        ["m", "2", "50.00 ± 3.00", "25.00 ± 4.00", "37.50 ± 2.50"],
        ["m", "4", "100.00 ± 1.00", "-", "-"],
        ["m", "8", "50.00 ± 1.00", "50.00", "50.00"],
    ]


@pytest.mark.parametrize(
    ("metric", "values", "shown"),
    [
        ("word_perplexity,none", (31.25, math.inf), ["31.25 ± 0.01", "inf ± 0.01"]),
        ("bits_per_byte,none", (0.75, 0.5), ["0.75 ± 0.01", "0.5 ± 0.01"]),
        ("bleu_max,none", (0.75, 0.5), ["0.75 ± 0.01", "0.5 ± 0.01"]),
        ("mcc,none", (0.5, -0.25), ["0.5 ± 0.01", "-0.25 ± 0.01"]),
    ],
)
def test_what_is_no_share_is_no_percent_and_in_no_average(metric, values, shown, tmp_path):
    found = [result("a", turns, 0.5) for turns in (2, 4)]
    other = [result("text", t, value) for t, value in zip((2, 4), values, strict=True)]
    found += [replace(each, metric=metric) for each in other]
    heads, _, *lines = cells(markdown_table(found))
    name = metric.partition(",")[0]
    assert heads[2:5] == ["a (n = 10)", f"text {name} (n = 10)", "KV/token"]
    assert [line[2:4] for line in lines] == [["50.00 ± 1.00", each] for each in shown]
    assert [path.name for path in report._draw(tmp_path, found, {"m": 4})] == ["accuracy.png"]
    assert report._draw(tmp_path, found[2:], {"m": 4}) == []
    assert shown[0] in found[2].summary or name == "mcc"


def test_metrics_by_their_names():
    for name in ("acc", "acc_norm", "exact_match", "bleu_acc", "rouge1_acc", "better", "filter"):
        assert replace(result("a", 2, 0.5), metric=f"{name},none").share
    for name in ("perplexity", "byte_perplexity", "bleu", "chrf", "ter", "rougeL_max", "rouge1"):
        assert not replace(result("a", 2, 0.5), metric=f"{name},none").share


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


def test_costs_of_a_row_are_of_all_its_tasks():
    first, second = result("a", 2, 0.5), result("b", 2, 0.5)
    memory = {"kv_bytes_per_token": 3 * 1024, "kv_bytes_at_context": 3 * 2**30}
    first = replace(first, tokens_per_second=10.0, seconds=1.0, context_length=2**20, **memory)
    second = replace(second, tokens_per_second=40.0, seconds=2.0, **memory)
    (_, _, line) = cells(markdown_table([first, second]))
    assert line[-3:] == ["3.0 KiB", "3.0 GiB (1,048,576)", "30.0"]


def test_samples_have_a_column_of_their_own_and_timeouts_are_told():
    drawn = replace(
        result("a", None, 0.5),
        samples_each=4,
        temperature=0.6,
        timeouts=3,
        pass_at={"1": {"value": 0.5, "stderr": 0.1}, "4": {"value": 0.75, "stderr": 0.125}},
    )
    heads, _, line = cells(markdown_table([drawn]))
    assert heads[:4] == ["model", "turns", "a avg@4 (n = 10)", "a pass@4"]
    assert line[:4] == ["m", "-", "50.00 ± 1.00 (3 timed out)", "75.00 ± 12.50"]


def test_a_standard_model_is_a_level_line(tmp_path, monkeypatch):
    from stars_fast.base import plots

    seen = {}

    def draw(lines, path, **given):
        seen[path.name] = (lines, given["level"])

    monkeypatch.setattr(plots, "accuracy_against_turns", draw)
    found = [result("a", None, 0.25, model="llama"), result("a", 2, 0.5), result("a", 4, 0.75)]
    report._draw(tmp_path, found, {"m": 4})
    assert seen == {"accuracy-a.png": ({"m": {2: 0.5, 4: 0.75}}, {"llama": 0.25})}
    monkeypatch.undo()
    (drawn,) = report._draw(tmp_path, found, {"m": 4})
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert report._draw(tmp_path, found[:1], {}) == []
