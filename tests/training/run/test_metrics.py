import json

import pytest
import torch

from stars_fast.training.run.metrics import Meter, MetricsLog, peak_flops, read_metrics
from stars_fast.training.step.train_step import StepPlan, StepStats


def stats(loss, penalty=0.0, finite=True):
    values = (loss, penalty, 1.0)
    return StepStats(*(torch.tensor(v) for v in values), 8, torch.tensor(finite))


def test_means_leave_out_skipped_steps_and_steps_without_a_penalty():
    meter = Meter(torch.device("cpu"))
    meter.add(stats(1.0), StepPlan(0, [2], 0.0, 0.1))
    meter.add(stats(float("nan"), float("inf"), finite=False), StepPlan(1, [3], 0.5, 0.1))
    meter.add(stats(3.0, 0.5), StepPlan(2, [4], 0.5, 0.2))
    row, streak = meter.line(StepPlan(2, [4], 0.5, 0.2))
    assert streak == 0
    assert row.pop("tokens_per_second") > 0
    assert row.pop("memory_gib") > 0
    assert row == {
        "mfu": None,
        "step": 3,
        "loss": 2.0,
        "penalty": 0.5,
        "lambda": 0.5,
        "depth": 3.0,
        "lr": 0.2,
        "grad_norm": 1.0,
        "tokens": 24,
        "skipped": 1,
    }


def test_nothing_finite_is_none_and_a_row_of_them_is_counted():
    meter = Meter(torch.device("cpu"))
    plan = StepPlan(0, [2], 0.5, 0.1)
    for _ in range(3):
        meter.add(stats(float("nan"), finite=False), plan)
    row, streak = meter.line(plan)
    assert (row["loss"], row["penalty"], row["skipped"], streak) == (None, None, 3, 3)
    meter.add(stats(1.0), plan)
    assert meter.line(plan)[1] == 0


def test_half_an_interval_carries_over():
    whole, first, second = (Meter(torch.device("cpu")) for _ in range(3))
    plan = StepPlan(0, [2], 0.5, 0.1)
    for meter, losses in ((whole, (0.1, 0.2, 0.3)), (first, (0.1, 0.2))):
        for loss in losses:
            meter.add(stats(loss, 0.7), plan)
    second.load(first.state())
    second.add(stats(0.3, 0.7), plan)
    rows = [meter.line(plan)[0] for meter in (whole, second)]
    for row in rows:
        row.pop("tokens_per_second")
        row.pop("memory_gib")
    assert rows[0] == rows[1]


def test_lines_after_the_checkpoint_and_a_cut_line_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": None})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]

    log = MetricsLog(path, 2)
    log.write({"step": 3, "loss": 0.5})
    lines = [json.loads(line) for line in path.read_text().splitlines()]  # before any close
    log.close()
    assert [(row["step"], row["loss"]) for row in lines] == [(1, None), (2, None), (3, 0.5)]


def test_trackers_get_every_line(tmp_path):
    said = []

    class Tracker:
        def log(self, row, step):
            said.append((step, row["loss"]))

        def flush(self):
            said.append("flush")

        def close(self):
            said.append("close")

    log = MetricsLog(tmp_path / "metrics.jsonl", 0, [Tracker()])
    log.write({"step": 5, "loss": 0.5})
    log.sync()
    log.close()
    assert said == [(5, 0.5), "flush", "close"]


class CommError(Exception):
    """Like W&B's, no OSError."""


@pytest.mark.parametrize("fails", ["log", "flush", "close"])
@pytest.mark.parametrize("error", [CommError("stream lost"), OSError(28, "No space left")])
def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on(tmp_path, fails, error):
    class Service:
        def __getattr__(self, name):
            def call(*_):
                called.append(name)
                if name == fails:
                    raise error

            return call

    called, said = [], []
    log = MetricsLog(tmp_path / "metrics.jsonl", 0, [Service()], said.append)
    for step in (1, 2):
        log.write({"step": step})
        log.sync()
    log.close()
    (line,) = said
    assert line.startswith("warning: Service can't write: ")
    assert ("CommError: stream lost" if isinstance(error, CommError) else "No space left") in line
    assert called.count(fails) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_the_share_of_the_peak():
    meter = Meter(torch.device("cpu"), peak=1e3)
    plan = StepPlan(0, [2], 0.0, 0.1)
    meter.add(stats(1.0), plan, flops=5e3)
    meter.since -= 10.0
    assert meter.line(plan)[0]["mfu"] == pytest.approx(0.5, rel=0.05)
    assert peak_flops(torch.device("cpu"), "mixed") is None
