"""What a study prints: its table as text, and how long it will take."""

from types import SimpleNamespace

import pytest

from stars_fast.training.config import load_config
from studies import runner
from studies.plain import plain

MARKDOWN = """\
# Norms (norms, quick)

Does `it` matter?

| placement | accuracy (%) at 4 | 100 |
|---|---|---|
| pre | 100.0 (99 to 100) | 0.5 |
| post-sandwich | 3.0 | 12.0 |

**Finding 1: agrees.** So it is.
- 2 * 3
"""


def test_markdown_on_a_terminal():
    assert plain(MARKDOWN) == (
        "Norms (norms, quick)\n\nDoes it matter?\n\n"
        "placement      accuracy (%) at 4   100\n"
        "pre            100.0 (99 to 100)   0.5\n"
        "post-sandwich                3.0  12.0\n\n"
        "Finding 1: agrees. So it is.\n- 2 * 3"
    )


def test_the_rest_of_a_study_is_told_by_the_turns_of_its_runs(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(runner.time, "perf_counter", lambda: clock[0])
    runs = [
        SimpleNamespace(
            folder=tmp_path / str(steps),
            config=load_config("addition-quick-sft", ["--steps", str(steps)]),
        )
        for steps in (100, 200, 300)
    ]
    left = runner.Remaining(runs)
    assert left.begin(runs[0]) == ""
    clock[0] = 60.0
    left.end(runs[0])
    assert left.begin(runs[1]) == "; about 5m00s left for 2 runs"
    clock[0] = 240.0
    left.end(runs[1])
    assert left.begin(runs[2]) == "; about 4m00s left for 1 run"


def test_a_run_whose_steps_follow_from_its_data_counts_as_one(tmp_path):
    config = load_config("addition-quick-sft", ["--epochs", "2"])
    run = SimpleNamespace(folder=tmp_path, config=config)
    assert runner.Remaining([run]).costs == {tmp_path: pytest.approx(1.0)}
