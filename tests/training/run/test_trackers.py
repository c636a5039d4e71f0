"""Where metrics go: TensorBoard's own files, and stand-ins for W&B and trackio that take their
calls by the names and defaults of wandb 0.31 and trackio 0.43."""

import math
import sys
from types import ModuleType

import pytest

from stars_fast.base.errors import ConfigError
from stars_fast.training.run.trackers import TRACKERS, open_trackers, scalar_values

ROW = {
    "step": 3,
    "loss": 0.5,
    "penalty": None,
    "tokens": 12,
    "grad_norm": math.nan,
    "warning": "collapse",
    "accuracy": {4: 0.25, 8: None},
    "validation": {"loss": {2: 1.5, 4: math.inf}},
}
NUMBERS = {"loss": 0.5, "tokens": 12, "accuracy/4": 0.25, "validation/loss/2": 1.5}


class StandInRun:
    def __init__(self, started):
        self.started, self.logged, self.finished = started, [], 0

    def log(self, data, step=None, commit=None):
        self.logged.append((data, step))

    def finish(self, exit_code=None):
        self.finished += 1


def _wandb_init(
    entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
    config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None,
    job_type=None, mode=None, force=None, reinit=None, resume=None, resume_from=None,
    fork_from=None, save_code=None, tensorboard=None, sync_tensorboard=None, monitor_gym=None,
    settings=None,
):  # fmt: skip
    return StandInRun(locals())


def _trackio_init(
    project, name=None, group=None, space_id=None, server_url=None, dataset_id=None,
    bucket_id=None, config=None, resume="never", settings=None, private=None, embed=True,
    auto_log_gpu=None, gpu_log_interval=10.0, auto_log_cpu=None, cpu_log_interval=10.0,
    webhook_url=None, webhook_min_level=None,
):  # fmt: skip
    if resume not in ("must", "allow", "never"):
        raise ValueError(resume)
    return StandInRun(locals())


@pytest.fixture
def stand_ins(monkeypatch):
    """The runs that were started, newest last."""
    started = []
    for name, init in (("wandb", _wandb_init), ("trackio", _trackio_init)):
        module = ModuleType(name)

        def run(*args, init=init, **kwargs):
            started.append(init(*args, **kwargs))
            return started[-1]

        module.init = run
        monkeypatch.setitem(sys.modules, name, module)
    return started


@pytest.fixture
def opened(tmp_path):
    def run(*names, step=0):
        return open_trackers(
            names, folder=tmp_path, run="one", project="loops", config={"a": {"b": 1}}, step=step
        )

    return run


def test_numbers_of_a_row():
    assert dict(scalar_values(ROW)) == NUMBERS


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_rows_reach_the_run(stand_ins, opened, name):
    (tracker,) = opened(name)
    tracker.log(ROW, 3)
    tracker.flush()
    (run,) = stand_ins
    assert run.logged == [(NUMBERS, 3)]
    assert not run.finished
    tracker.close()
    assert run.finished == 1
    assert (run.started["project"], run.started["name"]) == ("loops", "one")
    assert run.started["config"] == {"a": {"b": 1}}


def test_a_resumed_run_goes_on_under_its_id(stand_ins, opened, tmp_path):
    opened("wandb")
    opened("wandb", step=5)
    first, second = (run.started for run in stand_ins)
    assert first["id"] == second["id"] != ""
    assert first["resume"] == second["resume"] == "allow"
    assert first["dir"] == str(tmp_path)
    assert first["mode"] is None  # the user's WANDB_MODE decides
    (tmp_path / "wandb_id").unlink()
    opened("wandb")
    assert stand_ins[-1].started["id"] != first["id"]


def test_trackio_starts_anew_unless_resumed(stand_ins, opened):
    opened("trackio")
    opened("trackio", step=5)
    assert [run.started["resume"] for run in stand_ins] == ["never", "allow"]
    assert stand_ins[0].started["space_id"] is None  # nothing leaves the machine


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_library_that_is_missing_is_named(monkeypatch, opened, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        opened(name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_that_begins_no_run_is_named(monkeypatch, opened, name):
    def init(**_):
        raise CommError("no API key")

    class CommError(Exception):
        pass

    module = ModuleType(name)
    module.init = init
    monkeypatch.setitem(sys.modules, name, module)
    expected = f"train.report_to: {name} can't begin a run: CommError: no API key"
    with pytest.raises(ConfigError, match=expected):
        opened(name)


def test_tensorboard_is_left_out_where_it_is_missing(monkeypatch, opened):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert opened("tensorboard") == []


def test_tensorboard_drops_what_the_checkpoint_has_not_seen(opened, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tracker,) = opened("tensorboard", "tensorboard")
    for step in (1, 2, 3, 4):
        tracker.log(ROW | {"loss": float(step)}, step)
    tracker.flush()
    tracker.close()
    (tracker,) = opened("tensorboard", step=2)
    tracker.log(ROW | {"loss": 30.0}, 3)
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert set(events.Tags()["scalars"]) == set(NUMBERS)


def test_unknown_names_are_refused(opened):
    with pytest.raises(ValueError, match=f"names: expected some of .*{TRACKERS[0]}.*got 'mlflow'"):
        opened("tensorboard", "mlflow")
    assert opened() == []
