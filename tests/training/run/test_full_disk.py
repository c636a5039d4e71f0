"""A disk that is full for a while costs the saves of that while, and nothing else."""

import errno
import json
import re
import resource
import signal
from collections import Counter

import pytest
import torch

from stars_fast.base.checkpoints import checkpoints, saved_tensors
from stars_fast.base.run_folder import RunFolder
from stars_fast.cli import main
from stars_fast.training.config import save_config
from stars_fast.training.run import trainer
from stars_fast.training.run.checkpoint import Checkpoints
from stars_fast.training.run.metrics import MetricsLog, read_metrics
from stars_fast.training.run.trainer import TrainingFailure, train

EVERY_TWO = {"train": {"save_every": 2}}


@pytest.fixture
def full_at(monkeypatch):
    """full_at(*steps): the saves of these steps, once for each time it is given, have no room."""

    def have(*steps):
        left, real = Counter(steps), Checkpoints._finish

        def finish(self, temporary, path, *args):
            step = int(path.name.removeprefix("step-"))
            if left[step] > 0:
                left[step] -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(self, temporary, path, *args)

        monkeypatch.setattr(Checkpoints, "_finish", finish)

    return have


def saved(config):
    return sorted(checkpoints(RunFolder(config.out).checkpoints))


def test_a_run_goes_on_after_a_save_that_failed(tiny, tiny_in, tmp_path, full_at, capsys):
    straight = tiny_in(tmp_path / "straight", **EVERY_TWO)
    train(straight)
    full_at(2)
    config = tiny(**EVERY_TWO)
    assert train(config).step == 6
    (told,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert told.startswith(
        f"warning: the checkpoint of step 2 in {config.out}/checkpoints could not "
    )
    assert "No space left on device (" in told
    assert saved(config) == [4, 6]
    one, two = (saved_tensors(RunFolder(each.out).checkpoint()) for each in (straight, config))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_last_save_is_tried_again_at_the_end(tiny, full_at):
    full_at(6)
    config = tiny(**EVERY_TWO)
    train(config)
    assert saved(config) == [4, 6]


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([6, 6], "stars-fast train .*run --resume goes on from step-000004"),
        ([2, 4, 6, 6], "there is none before it"),
    ],
)
def test_a_run_whose_last_save_fails_has_failed(tiny, tmp_path, full_at, capsys, steps, kept):
    full_at(*steps)
    save_config(tiny(**EVERY_TWO), tmp_path / "recipe.yaml")
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("stars-fast: the checkpoint of step 6 in ")
    assert re.search(kept, last)
    assert main(["train", str(tmp_path / "run"), "--resume"]) == 0
    assert saved(tiny())[-1] == 6


@pytest.mark.parametrize("fails", [False, True])
def test_sigterm_after_a_save_that_failed_saves(tiny, full_at, monkeypatch, fails):
    real = trainer.train_step

    def step(step_loss, optimizer, config, window, plan, world):
        if plan.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(step_loss, optimizer, config, window, plan, world)

    monkeypatch.setattr(trainer, "train_step", step)
    full_at(2, *([3] if fails else []))
    config = tiny(**EVERY_TWO)
    if fails:
        with pytest.raises(TrainingFailure, match=r"checkpoint of step 3 .* could not be written"):
            train(config)
        assert saved(config) == []
    else:
        assert train(config).signal == signal.SIGTERM
        assert saved(config) == [3]


@pytest.fixture
def limited():
    """limited(bytes): no file of this process grows beyond so many; None: no limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(most):
        most = limits[0] if most is None else most
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_metrics_that_find_no_room_are_written_later(tmp_path, limited):
    told = []
    log = MetricsLog(tmp_path / "metrics.jsonl", 0, say=told.append)
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 9)]
    log.write(rows[0])
    limited(40)  # in the midst of a line
    for row in rows[1:5]:
        log.write(row)
    with pytest.raises(OSError, match="File too large"):
        log.sync()
    assert read_metrics(tmp_path / "metrics.jsonl") == rows[:1]
    limited(None)
    log.write(rows[5])
    assert read_metrics(tmp_path / "metrics.jsonl") == rows[:6]
    log.sync()
    (line,) = told
    assert line.startswith(
        f"warning: {tmp_path}/metrics.jsonl can't be written to: File too large ("
    )
    limited((tmp_path / "metrics.jsonl").stat().st_size + 5)
    for row in rows[6:]:
        log.write(row)
    limited(None)
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == rows


def test_a_tracker_without_room_is_dropped(tmp_path):
    class Tracker:
        def log(self, row, step):
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self):
            raise AssertionError

        close = flush

    told = []
    log = MetricsLog(tmp_path / "metrics.jsonl", 0, [Tracker()], told.append)
    for step in (1, 2):
        log.write({"step": step})
    log.sync()
    log.close()
    (line,) = told
    assert line.startswith("warning: Tracker can't write: No space left on device (")
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1]) == {"step": 2}


@pytest.mark.parametrize("stage", ["open_run", "write_results"])
def test_other_files_without_room_are_one_error(tiny, tmp_path, monkeypatch, capsys, stage):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer, stage, fail)
    save_config(tiny(eval={"turns": [1]}), tmp_path / "recipe.yaml")
    assert (
        main(["train", str(tmp_path / "recipe.yaml")]) == {"open_run": 2, "write_results": 1}[stage]
    )
    last = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device (" in last
    assert str(tmp_path / "run") in last
