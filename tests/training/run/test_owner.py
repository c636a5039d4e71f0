"""A run folder has one run at work in it, which begins before anything slow."""

import time

import pytest
import torch

from stars_fast.base.checkpoints import saved_tensors
from stars_fast.base.claim import Claim
from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.cli import main
from stars_fast.training.config import save_config
from stars_fast.training.run import folder, trainer
from stars_fast.training.run.trainer import TrainingFailure, train
from stars_fast.training.scale.distributed import World


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


def test_a_mistake_of_a_resumed_run_takes_nothing_away(tiny, monkeypatch):
    """Of one that died before its first step, and whose data can't be had today."""
    run = folder.RunFolder(tiny().out)
    run.path.mkdir()
    save_config(tiny(), run.config)

    def unreachable(*_):
        raise ConfigError("the hub can't be reached")

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Task", unreachable)
        with pytest.raises(ConfigError, match="hub"):
            train(tiny(), resume=True)
    assert names(run.path) == ["config.yaml"]
    assert train(tiny(), resume=True).step == 6


def test_a_recipe_that_lies_in_the_folder_is_not_overwritten(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    recipe = tmp_path / "run" / "config.yaml"
    save_config(tiny(), recipe)
    before = recipe.read_text()
    with pytest.raises(ConfigError, match="exists; continue that run with --resume"):
        train(tiny(seed=3))
    assert recipe.read_text() == before


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


@pytest.mark.slow
def test_all_processes_are_told_of_the_first_run(tiny, tmp_path, held, launch, capfd):
    save_config(tiny(), tmp_path / "recipe.yaml")
    command = ["-m", "stars_fast.cli", "train", str(tmp_path / "recipe.yaml")]
    assert launch(command, processes=2) == [2, 2]
    told = f"stars-fast: {tmp_path / 'run'} belongs to {held._owner}, which is at work there"
    assert capfd.readouterr().err.count(told) == 2


class One(World):
    """One of two processes, which hears no word of the other but these."""

    token = reason = None

    def from_first(self, value):
        return self.token or value

    def first_reason(self, reason):
        return reason or self.reason


@pytest.mark.parametrize("there", ["nothing", "another run", "the run"])
def test_a_folder_is_the_one_of_the_first_process_or_an_error(tiny, tmp_path, monkeypatch, there):
    for name in ("LAPSE", "BEAT"):
        monkeypatch.setattr(f"stars_fast.base.claim.{name}", 0.0)
    claim = Claim(tmp_path / "run", print)
    One.token = claim.token if there == "the run" else "of the first"
    if there == "nothing":
        claim.withdraw()

    def begin():
        with folder.owned(run, tiny(), One(1, 2, torch.device("cpu")), False) as held:
            assert held is None

    run = RunFolder(tiny().out)
    try:
        if there == "the run":
            begin()
        else:
            with pytest.raises(ConfigError, match=f"that all machines see, got {run.path}, which"):
                begin()
    finally:
        One.token = None
        claim.release()


def test_the_first_process_leaves_no_folder_that_others_do_not_see(tiny, monkeypatch):
    first, config = One(0, 2, torch.device("cpu")), tiny()
    real, calls = One.first_reason, []

    def first_reason(self, reason):
        calls.append(reason)
        return real(self, reason) if len(calls) == 1 else "another folder"

    monkeypatch.setattr(One, "first_reason", first_reason)
    with (
        pytest.raises(ConfigError, match="another folder"),
        folder.owned(RunFolder(config.out), config, first, False),
    ):
        raise AssertionError("it began")
    assert not RunFolder(config.out).path.exists()


def test_a_run_that_is_at_work_can_be_read(tiny, tmp_path):
    config = tiny(train={"save_every": 2})
    train(config)
    claim = Claim(tmp_path / "run", print)
    try:
        assert main(["eval", str(config.out), "--turns", "1"]) == 0
        assert main(["export", str(config.out), str(tmp_path / "exported")]) == 0
        assert claim.check()
    finally:
        claim.release()


@pytest.mark.slow
def test_a_damaged_checkpoint_of_a_run(tiny, tiny_in, tmp_path, capsys):
    """The run goes on from the one before, bit for bit, with a word; who reads it is asked."""
    straight = tiny_in(tmp_path / "straight", train={"save_every": 2})
    train(straight)
    config = tiny(train={"save_every": 2})
    train(config)
    run = folder.RunFolder(config.out)
    damaged = run.checkpoint()
    weights = next(damaged.glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[1000:1008] = bytes(255 - byte for byte in content[1000:1008])
    weights.write_bytes(content)
    for reading in (["eval", "--turns", "1"], ["analyze"], ["export"]):
        where = [str(tmp_path / "exported")] if reading == ["export"] else []
        assert main([reading[0], str(run.path), *where, *reading[1:]]) == 2
        told = capsys.readouterr().err
        assert f"{damaged} is damaged" in told
        assert "step-000004 before it is whole (--step 4)" in told
    assert main(["eval", str(run.path), "--turns", "1", "--step", "4"]) == 0
    assert main(["train", str(run.path), "--resume"]) == 0
    told = capsys.readouterr().err
    assert f"warning: {damaged} is damaged" in told
    assert "continues after step 4" in told
    one, two = (
        saved_tensors(folder.RunFolder(each.out).checkpoint()) for each in (straight, config)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    (damaged / "state.pt").unlink()
    assert main(["eval", str(run.path), "--turns", "1"]) == 2
    assert "state.pt is missing; step-000004 before it is whole" in capsys.readouterr().err
