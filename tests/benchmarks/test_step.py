"""The step level of the benchmarks: every case runs, on the same documents and depths."""

import argparse
import importlib
import json
from dataclasses import replace

import pytest
import torch

from benchmarks import published, step
from benchmarks.step_cases import STEP_CASES, StepCase
from benchmarks.step_runs import Bench, Steps
from benchmarks.workload import LAW, MICROS, balanced_depths
from stars_fast.models.depth import DepthLaw
from stars_fast.training.step.methods import penalty_of


@pytest.fixture(scope="module")
def bench():
    return Bench("tiny", "cpu", "float32", tokens=64, repeats=3, layers=1)


def options(*words, **common):
    parser = argparse.ArgumentParser()
    step.add_options(parser)
    known = {"device": "cpu", "threads": None, "repeats": 1, "json": None, "small": True}
    return argparse.Namespace(**vars(parser.parse_args(words)), **known | common)


@pytest.mark.parametrize("name", STEP_CASES)
def test_the_first_step_of_each_case_has_a_finite_loss(bench, name):
    assert Steps(bench, STEP_CASES[name]).step(0).isfinite()


def test_a_step_of_both_sides_starts_from_the_same_loss():
    """Per document the published way, per token ours: equal for documents of one length."""
    losses = []
    for name in ("published-sft", "sft"):
        bench = Bench("tiny", "cpu", "float32", tokens=8, repeats=1, layers=1)
        losses.append(Steps(bench, STEP_CASES[name]).step(0))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("steps", [4, 6, 10, 25])
def test_depths_have_the_mean_of_the_law_and_steps_are_alike(steps):
    law = DepthLaw(**LAW)
    dealt = balanced_depths(law, steps, MICROS)
    depths = [depth for step in dealt for depth in step]
    assert [len(step) for step in dealt] == [MICROS] * steps
    assert sum(depths) / len(depths) == pytest.approx(law.mean(), abs=0.02)
    sums = [sum(step) for step in dealt]
    assert max(sums) - min(sums) <= 4


def test_arithmetic_of_cases_is_that_of_their_documents(bench):
    def flops(case, step=1):
        return bench.flops(case, step, bench.turns(case, step), recomputed=True)

    exact, sft = flops(STEP_CASES["jsrr"]), flops(STEP_CASES["sft"])
    dual = exact - sft
    micro = [
        flops(STEP_CASES["jsrr-quarter-micro"], s) - flops(STEP_CASES["sft"], s) for s in (1, 2, 3)
    ]
    whole = [flops(STEP_CASES["jsrr"], s) - flops(STEP_CASES["sft"], s) for s in (1, 2, 3)]
    for part, all_documents in zip(micro, whole, strict=True):
        assert 0.15 < part / all_documents < 0.35  # one row of four
    assert flops(STEP_CASES["jsrr-last"]) < sft + 0.6 * dual
    checkpointed = flops(STEP_CASES["published-sft"])
    kept = bench.flops(STEP_CASES["published-sft"], 1, [4] * MICROS, recomputed=False)
    assert kept == flops(STEP_CASES["published-sft-kept"])
    assert checkpointed > kept > sft  # whose head sees supervised positions alone


def test_times_that_follow_the_arithmetic_give_its_ratios(bench):
    rows, runs = {}, {}
    for name in ("sft", "stars", "published-sft"):
        case = STEP_CASES[name]
        seconds = [bench.flops(case, s, bench.turns(case, s), True) * 1e-9 for s in (1, 2, 3)]
        runs[name] = Steps(bench, case)
        rows[name] = runs[name].row(seconds, peak=1e12)
    even = [
        bench.flops(STEP_CASES["stars"], s, [bench.law.mean()] * MICROS, True) for s in (1, 2, 3)
    ]
    assert rows["stars"]["seconds_at_mean"] == pytest.approx(sorted(even)[1] * 1e-9, rel=1e-4)
    assert rows["stars"]["paper"] == 2.0439
    assert rows["sft"]["mfu"] == pytest.approx(1e-3)
    assert rows["published-sft"]["mfu"] < 1e-3  # what is computed again is not needed
    step._add_ratios(rows, runs)
    assert rows["sft"]["over_own"] == rows["sft"]["floor_own"] == 1
    assert rows["stars"]["over_own"] == pytest.approx(rows["stars"]["floor_own"], rel=0.05)
    assert rows["stars"]["over_published"] < rows["stars"]["over_own"]


@pytest.mark.parametrize("failing", [0, 1], ids=["alone", "among the others"])
def test_a_case_without_memory_leaves_the_others(monkeypatch, failing):
    right = Steps.step

    def full(self, number):
        if self.case.method == "jsrr" and number == failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return right(self, number)

    monkeypatch.setattr(Steps, "step", full)
    rows = step.measure_steps("tiny", "cpu", "float32", 64, 1, 1, ("sft", "jsrr"))["methods"]
    assert rows["jsrr"] == {"failed": "out of memory"}
    assert rows["sft"]["over_own"] == 1


def break_steps(monkeypatch, error, of_published):
    """The steps of the cases of one side raise."""
    right = Steps.step

    def broken(self, number):
        if self.case.published == of_published:
            raise error
        return right(self, number)

    monkeypatch.setattr(Steps, "step", broken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (RuntimeError("shapes differ"), "RuntimeError: shapes differ", 1),
        (AttributeError("no such layer"), "AttributeError: no such layer", 1),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory", 0),
    ],
    ids=["runtime", "attribute", "memory"],
)
@pytest.mark.parametrize("of_published", [False, True], ids=["ours", "published"])
def test_a_broken_case_leaves_the_others(monkeypatch, tmp_path, error, said, code, of_published):
    break_steps(monkeypatch, error, of_published)
    names, path = ["sft", "published-sft"], tmp_path / "step.json"
    assert step.run(options("--cases", *names, json=path)) == (0 if of_published else code)
    rows = json.loads(path.read_text())["shapes"][0]["methods"]
    assert rows[names[of_published]] == {"failed": said}
    assert rows[names[not of_published]]["seconds"] > 0


def test_who_interrupts_a_run_ends_it(monkeypatch):
    break_steps(monkeypatch, KeyboardInterrupt(), of_published=False)
    with pytest.raises(KeyboardInterrupt):
        step.measure_steps("tiny", "cpu", "float32", 64, 1, 1, ("sft",))


def test_memory_that_is_not_known_leaves_the_times(monkeypatch):
    def killed(*args, **kwargs):
        raise RuntimeError("killed by SIGKILL")

    monkeypatch.setattr(step, "in_its_own_process", killed)
    row = step.measure_steps("tiny", "cpu", "float32", 64, 1, 1, ("sft",), memory=True)["methods"][
        "sft"
    ]
    assert row["seconds"] > 0
    assert row["mib"] == "RuntimeError: killed by SIGKILL"


def test_a_loss_that_is_not_finite_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(Steps, "step", lambda self, number: torch.tensor(float("nan")))
    assert step.run(options("--cases", "sft")) == 1
    assert "loss nan" in capsys.readouterr().out


def test_run_prints_a_table_and_writes_json(tmp_path, capsys):
    path = tmp_path / "step.json"
    names = ["published-sft", "sft", "stars-last-quarter-micro"]
    assert step.run(options("--cases", *names, json=path)) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert printed.count("by count") == 2
    assert "floor" not in printed
    result = json.loads(path.read_text())
    assert set(result) == {"level", "machine", "shapes"}
    assert result["level"] == "step"
    assert result["machine"]["torch"] == torch.__version__
    (shape,) = result["shapes"]
    assert list(shape["methods"]) == names
    for row in shape["methods"].values():
        assert row["seconds"] > 0
        assert row["tokens_per_second"] > 0
        assert row["floor_published"] > 0
    assert shape["methods"]["sft"]["over_published"] > 0


@pytest.mark.slow
def test_memory_of_a_step_in_a_process_of_its_own():
    names = ("sft",)
    result = step.measure_steps("tiny", "cpu", "float32", 256, 1, None, names, memory=True)
    # Four rows of 256 tokens at four turns of two layers keep some MiB, and no GiB.
    assert 1 < result["methods"]["sft"]["mib"] < 1000


def test_run_stops_where_the_published_way_is_wrong(monkeypatch, capsys):
    right = published.Published.token_loss
    monkeypatch.setattr(published.Published, "token_loss", lambda *args: 1.01 * right(*args))
    assert step.run(options("--cases", "sft")) == 1
    assert "token loss" in capsys.readouterr().out


def test_cases_say_what_they_are():
    assert STEP_CASES["published-stars"] == StepCase("stars", published=True, paper=2.0439)
    assert STEP_CASES["stars"].paper == 2.0439
    assert STEP_CASES["stars-last"].paper is None
    paper = {case.method for case in STEP_CASES.values() if case.paper is not None}
    for side in (False, True):  # each method of the paper, as the paper has it, on both sides
        assert paper == {
            case.method
            for case in STEP_CASES.values()
            if case.published == side and case.checkpointed and not case.penalty
        }


def test_a_batch_that_is_a_whole_step_counts_or_not(bench):
    """Whatever the accumulation says."""
    batch = replace(bench.windows[1][0], step_micro_batches=1, index=0)
    factors = {
        name: {penalty_of(bench.config(STEP_CASES[name])).factor(batch, step) for step in range(40)}
        for name in ("jsrr", "jsrr-quarter", "jsrr-quarter-micro")
    }
    assert factors == {"jsrr": {1.0}, "jsrr-quarter": {1.0}, "jsrr-quarter-micro": {0.0, 4.0}}


@pytest.fixture
def benchmark_file():
    return importlib.import_module("benchmarks.test_step")


def test_a_dtype_that_is_no_precision_is_refused(benchmark_file):
    assert benchmark_file.precision_of("cpu", None) == "float32"
    assert benchmark_file.precision_of("cuda", "bfloat16") == "bfloat16"
    with pytest.raises(pytest.UsageError, match=r"--bench-dtype: expected .* got float16"):
        benchmark_file.precision_of("cpu", "float16")
