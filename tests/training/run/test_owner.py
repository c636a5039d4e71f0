"""A run folder has one run at work in it, which begins before anything slow."""

import time

import pytest

from stars_fast.base.claim import Claim
from stars_fast.base.errors import ConfigError
from stars_fast.cli import main
from stars_fast.training.config import save_config
from stars_fast.training.run import folder, trainer
from stars_fast.training.run.trainer import TrainingFailure, train


@pytest.fixture
def held(tmp_path):
    claim = Claim(tmp_path / "run", print)
    yield claim
    claim.release()


def names(path):
    return sorted(each.name for each in path.iterdir() if each.name != ".claims")


@pytest.fixture
def _nothing_slow(monkeypatch):
    def slow(*_):
        raise AssertionError("a model or data were opened")

    monkeypatch.setattr(trainer, "Task", slow)


@pytest.mark.usefixtures("_nothing_slow")
@pytest.mark.parametrize("resume", [False, True])
def test_the_second_run_is_told_who_the_first_is(tiny, tmp_path, held, capsys, resume):
    save_config(tiny(), tmp_path / "recipe.yaml")
    if resume:  # as the first one writes it
        save_config(tiny(), tmp_path / "run" / "config.yaml")
    before = names(tmp_path / "run")
    command = ["train", str(tmp_path / "recipe.yaml"), *(["--resume"] if resume else [])]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'run'} belongs to {held._owner}, which is at work there" in error
    assert names(tmp_path / "run") == before
    assert held.check()


def test_a_run_that_has_been_and_gone_meanwhile_is_not_overwritten(tiny, monkeypatch):
    """It began and ended between this one's look at the folder and its claim."""
    real = trainer.check

    def check(*args):
        real(*args)
        monkeypatch.setattr(trainer, "check", real)
        train(tiny(seed=1))

    monkeypatch.setattr(trainer, "check", check)
    with pytest.raises(ConfigError, match="exists; continue that run with --resume"):
        train(tiny(seed=2))
    assert "seed: 1" in folder.RunFolder(tiny().out).config.read_text()


def test_a_mistake_leaves_no_folder(tiny, tmp_path):
    out = tmp_path / "runs" / "run"
    with pytest.raises(ConfigError, match="batch"):
        train(tiny(out=str(out), train={"batch_size": 7, "accumulation": 2}))
    assert not out.parent.exists()
    out.mkdir(parents=True)
    with pytest.raises(ConfigError, match="batch"):
        train(tiny(out=str(out), train={"batch_size": 7, "accumulation": 2}))
    assert not list(out.iterdir())


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_died_before_its_first_step_starts_either_way(tiny, monkeypatch, resume):
    class Killed(BaseException):
        """As a kill, which nothing catches."""

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Task", die)
        patch.setattr(Claim, "release", lambda self: self._stop.set())
        with pytest.raises(Killed):
            train(tiny())
    run = folder.RunFolder(tiny().out)
    assert names(run.path) == ["config.yaml"]
    monkeypatch.setattr("stars_fast.base.claim._started", lambda pid: "later")
    assert train(tiny(), resume=resume).step == 6


def test_a_run_whose_folder_was_taken_stops_and_saves_nothing(tiny, monkeypatch):
    real = trainer.train_step

    def step(step_loss, optimizer, config, window, plan, world):
        if plan.step == 3:
            while not (run.checkpoints / "step-000002").exists():
                time.sleep(0.01)
            (run.path / ".claims" / "2").write_text("{}")
            claims[0].check()
        return real(step_loss, optimizer, config, window, plan, world)

    claims = []
    init = Claim.__init__

    def noted(self, *args):
        init(self, *args)
        claims.append(self)

    run = folder.RunFolder(tiny().out)
    monkeypatch.setattr(Claim, "__init__", noted)
    monkeypatch.setattr(trainer, "train_step", step)
    with pytest.raises(
        TrainingFailure, match=r"stopped after step 4: .* belongs to another process"
    ):
        train(tiny(train={"save_every": 2}))
    assert names(run.checkpoints) == ["step-000002"]
