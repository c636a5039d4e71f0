"""Timeouts of math-verify: neither right nor wrong, and counted."""

import json
import logging

import pytest
from benchmark_data import row_of, write_rows

from stars_fast.cli import main
from stars_fast.evaluation.benchmarks import open_tasks
from stars_fast.evaluation.harness import judge
from stars_fast.evaluation.verifier import TIMED_OUT, timeouts_told

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("math_verify", reason="math-verify is not installed")

ENDLESS = "So $\\boxed{9^{9^{9}}}$."
"""Takes sympy longer than there is time to compare with a number."""


def says(*responses):
    """A model of lm-eval that answers so, in the order of the documents."""
    from lm_eval.api.model import LM

    class Says(LM):
        loglikelihood = loglikelihood_rolling = None

        def generate_until(self, requests, disable_tqdm=False):
            return [responses[request.doc_id] for request in requests]

    return Says()


@pytest.fixture
def tasks(tmp_path):
    """AMC23, of ours, and MATH-500, of lm-eval's: what is 1 + 2, four times."""
    for name in ("amc23", "math500"):
        write_rows(tmp_path / f"{name}.jsonl", [row_of(name, 1, 2, 3)] * 4)
    return {each.name: each for each in open_tasks(["amc23", "math500"], str(tmp_path), 9, None)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amc23", "math500"])
def test_what_the_verifier_had_no_time_for_is_left_out_of_the_score(tasks, name, caplog):
    opened = tasks[name]
    model = says("$\\boxed{3}$", ENDLESS, "$\\boxed{4}$", "$\\boxed{3}$")
    found = judge(model, opened.task, resamples=10)
    scores, samples = found["results"][opened.task.task_name], found["samples"]
    assert scores["math_verify,none"] == pytest.approx(2 / 3)
    assert scores["math_verify_stderr,none"] == pytest.approx((2 / 3 * 1 / 3 / 2) ** 0.5)
    assert scores[f"{TIMED_OUT},none"] == 1
    rows = samples[opened.task.task_name]
    assert [row[TIMED_OUT] for row in rows] == [0, 1, 0, 0]
    assert ["math_verify" in row["metrics"] for row in rows] == [True, False, True, True]
    assert "Timeout during" not in caplog.text


class Told:
    """As much of a task as is wrapped; its scoring meets a timeout that math-verify tells of."""

    def __init__(self, metrics, record="Timeout during comparison"):
        self.metrics, self.record = metrics, record

    def process_results(self, doc, results):
        logging.getLogger("math_verify.grader").warning(self.record)
        return self.metrics

    def aggregation(self):
        return {}


@pytest.mark.parametrize(
    ("metrics", "out"),
    [
        ({"math_verify": 0}, True),
        ({"math_verify": 1}, False),  # another of its comparisons found it right
        ({"math_verify": 0, "exact_match": 1}, True),
        ({"math_verify": 1, "exact_match": 0}, False),
        ({"acc": 0.0}, True),
        ({"acc": 1.0}, False),
    ],
)
def test_what_another_comparison_found_right_is_right(metrics, out):
    task = Told(metrics)
    with timeouts_told(task):
        found = task.process_results(None, None)
    assert found == ({TIMED_OUT: 1} if out else metrics | {TIMED_OUT: 0})
    assert "process_results" not in vars(task)


def test_other_words_of_the_verifier_are_no_timeouts():
    task = Told({"math_verify": 0}, "Timeout is disabled as timeout_seconds is None")
    logger = logging.getLogger("math_verify.grader")
    before = (logger.level, logger.propagate, list(logger.handlers))
    logger.setLevel(logging.CRITICAL)
    try:
        with timeouts_told(task):
            assert task.process_results(None, None) == {"math_verify": 0, TIMED_OUT: 0}
        task.record = "Timeout during parsing: x"
        with timeouts_told(task):
            assert task.process_results(None, None) == {TIMED_OUT: 1}
        assert logger.level == logging.CRITICAL
    finally:
        logger.setLevel(before[0])
    assert (logger.propagate, logger.handlers) == before[1:]


@pytest.mark.slow
def test_a_sweep_counts_and_tells_them(tmp_path, monkeypatch, capsys):
    """The verifier's own timeouts, of responses that a model is made to give."""
    from stars_fast.evaluation import hf_model
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "remote_code": False}
    model = write_tiny_ouro(tmp_path / "tiny", **sizes)
    rows = [row_of("amc23", a, 2, 3) for a in range(3)]
    write_rows(tmp_path / "amc23.jsonl", rows)
    given = iter(["<eos>", "$\\boxed{3}$", ENDLESS, "$\\boxed{4}$"])
    monkeypatch.setattr(hf_model.HFLM, "tok_decode", lambda *_, **__: next(given, "none"))
    words = f"eval {model} --tasks amc23 --turns 2 --max-new-tokens 4 --device cpu --batch-size 1"
    assert main([*words.split(), "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert (result["timeouts"], result["n"]) == (1, 2)
    assert result["accuracy"] == 0.5
    said = capsys.readouterr()
    assert "math-verify ran out of time on 1 responses of amc23 at 2 turns" in said.err
    assert "50.00 ± 50.00 (1 timed out)" in said.out
