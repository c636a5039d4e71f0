"""One run in one process: signals, steps that are not finite, the folder, the end."""

import gc
import json
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from stars_fast.base.checkpoints import checkpoints, latest, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.data.addition import write_jsonl
from stars_fast.data.kinds.sums import Sums
from stars_fast.models.families import looped_lm
from stars_fast.models.families.looped_lm import FAMILY, LoopedLoop
from stars_fast.models.saved import find_model, load_model
from stars_fast.training.run import checkpoint, interrupt, trainer
from stars_fast.training.run.metrics import MetricsLog, read_metrics
from stars_fast.training.run.task import Task
from stars_fast.training.run.trainer import Trainer, TrainingFailure, train
from stars_fast.training.step import train_step as step


@pytest.fixture(autouse=True)
def heard():
    """SIGINT as in a shell, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def at_step(monkeypatch):
    """at_step(n, act): call act() as step n begins."""
    real = trainer.train_step

    def arrange(number, act):
        def train_step(*args):
            if args[4].step == number:
                act()
            return real(*args)

        monkeypatch.setattr(trainer, "train_step", train_step)

    return arrange


def weights(folder):
    return saved_tensors(latest(folder / "checkpoints"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tiny, at_step, capsys, number):
    config = tiny()
    at_step(2, lambda: signal.raise_signal(number))
    outcome = train(config)
    assert (outcome.step, outcome.signal) == (3, number)
    assert sorted(checkpoints(outcome.folder / "checkpoints")) == [3]
    said = capsys.readouterr().err
    assert f"{number.name}: stopped after step 3" in said
    assert f"stars-fast train {outcome.folder} --resume" in said
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    assert train(config, resume=True)[::2] == (6, 0)


def test_a_second_signal_is_the_same_wish_and_later_acts_at_once(tiny, at_step, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    at_step(2, twice)
    assert train(tiny())[::2] == (3, signal.SIGINT)
    monkeypatch.setattr(interrupt, "IMPATIENT", 0.0)
    at_step(4, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), resume=True)


def test_a_signal_in_the_last_save_waits_for_it_and_evaluates_nothing(tiny, monkeypatch, capsys):
    real, config = checkpoint.checksum, tiny(eval={"turns": [1]})

    def slow(path):
        if threading.current_thread() is not threading.main_thread() and not heard:
            heard.append(path)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return real(path)

    heard = []
    monkeypatch.setattr(checkpoint, "checksum", slow)
    with monkeypatch.context() as patch:
        patch.setattr(Task, "evaluate", lambda *_: 1 / 0)
        outcome = train(config)
    assert (outcome.step, outcome.signal) == (6, signal.SIGINT)
    assert sorted(checkpoints(outcome.folder / "checkpoints")) == [6]
    assert "SIGINT: stopped after step 6, saved" in capsys.readouterr().err
    assert train(config, resume=True)[::2] == (6, 0)
    assert json.loads((outcome.folder / "results.json").read_text())["step"] == 6


class Killed(BaseException):
    """As a kill, which nothing catches."""


@pytest.mark.parametrize("how", ["killed in the evaluation", "stopped before it"])
def test_the_save_of_a_step_comes_before_its_evaluation(
    tiny, tiny_in, tmp_path, at_step, monkeypatch, how
):
    """And the line of the step, with the evaluation, comes when the run goes on."""
    changes = {"eval": {"turns": [1, 4], "every": 2}, "train": {"save_every": 2, "log_every": 2}}
    straight = train(tiny_in(tmp_path / "straight", **changes)).folder
    config, real = tiny(**changes), Task.evaluate
    run = tmp_path / "run"

    def evaluate(task, *args):
        if not judged:  # of step 2
            judged.append(task)
            return real(task, *args)
        end = time.monotonic() + 5
        while not (run / "checkpoints" / "step-000004").exists() and time.monotonic() < end:
            time.sleep(0.01)
        raise Killed

    judged = []
    with monkeypatch.context() as patch:
        patch.setattr(Task, "evaluate", evaluate)
        if how == "stopped before it":
            at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
            assert train(config).step == 4
        else:
            with pytest.raises(Killed):
                train(config)
    assert len(judged) == 1
    assert sorted(checkpoints(run / "checkpoints")) == [2, 4]
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [2]
    train(config, resume=True)
    one, two = (read_metrics(folder / "metrics.jsonl") for folder in (straight, run))
    assert [row["step"] for row in two] == [2, 4, 6]
    for name in ("step", "loss", "penalty", "grad_norm", "depth", "tokens", "accuracy"):
        assert [row.get(name) for row in one] == [row.get(name) for row in two], name
    before, after = weights(straight), weights(run)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_line_that_is_there_is_not_made_again(tiny, monkeypatch):
    """The run goes on from a step whose checkpoint holds a line that was written later."""
    config = tiny(eval={"turns": [1], "every": 2}, train={"save_every": 4, "keep": 0})
    real = trainer.train_step

    def killed(*args):
        if args[4].step == 5:
            raise Killed
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", killed)
        with pytest.raises(Killed):
            train(config)
    first = read_metrics(trainer.RunFolder(config.out).metrics)
    folder = train(config, resume=True).folder
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[:4] == first[:4]
    assert [row["step"] for row in rows if "accuracy" in row] == [2, 4]


def test_what_a_resumed_run_needs_to_begin_is_not_the_time_of_its_steps(tiny, at_step, monkeypatch):
    config = tiny(train={"log_every": 4})
    at_step(4, lambda: signal.raise_signal(signal.SIGTERM))
    assert train(config).step == 5
    real = Trainer._open

    def slow(self, *args):
        time.sleep(3)
        return real(self, *args)

    monkeypatch.setattr(Trainer, "_open", slow)
    rows = read_metrics(train(config, resume=True).folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 6]
    seconds = (rows[1]["tokens"] - rows[0]["tokens"]) / rows[1]["tokens_per_second"]
    assert 0 < seconds < 3


def test_nothing_is_left_of_a_run_in_a_process(tiny_in, tmp_path, monkeypatch):
    """The first one imports modules that hold on to their importers' frames."""
    train(tiny_in(tmp_path / "first"))
    made, real = [], Trainer.__init__

    def noted(self, *args):
        real(self, *args)
        made.extend(weakref.ref(each) for each in (self, self.optimizer, self.model))

    monkeypatch.setattr(Trainer, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        train(tiny_in(tmp_path / "second"))
        assert [each() for each in made[:2]] == [None, None]
    finally:
        gc.enable()
    gc.collect()  # of torch's own walk over a model there is a cycle left
    assert made[2]() is None
    threads = [each.name for each in threading.enumerate()]
    assert not [name for name in threads if name.startswith(("checkpoint", "batches", "claim"))]


def test_all_of_the_end_is_done_whatever_fails(tiny, at_step, monkeypatch):
    real, close = checkpoint.checksum, MetricsLog.close

    def broken(self):
        close(self)
        raise RuntimeError("the tracker has gone")

    monkeypatch.setattr(checkpoint, "checksum", lambda path: time.sleep(0.2) or real(path))
    monkeypatch.setattr(MetricsLog, "close", broken)
    at_step(2, lambda: 1 / 0)
    config = tiny(train={"save_every": 2})
    with pytest.raises(RuntimeError, match="the tracker has gone") as error:
        train(config)
    assert isinstance(error.value.__context__, ZeroDivisionError)
    assert sorted(checkpoints(trainer.RunFolder(config.out).checkpoints)) == [2]


@pytest.mark.parametrize("method", ["sft", "random-loop", "jsrr", "stars", "l2"])
def test_every_method_lowers_its_loss(tiny, method):
    config = tiny(method=method, train={"steps": 40}, optim={"lr": 0.01})
    rows = read_metrics(train(config).folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert sum(row["loss"] for row in rows[-5:]) < 0.8 * sum(row["loss"] for row in rows[:5])
    penalised = method in ("jsrr", "stars", "l2")
    assert all((row["penalty"] is not None) == penalised for row in rows)
    assert all(row["lambda"] == (0.1 if penalised else 0.0) for row in rows)
    depths = {row["depth"] for row in rows}
    assert depths == {3} if method in ("sft", "jsrr") else len(depths) > 1


def test_the_penalty_and_its_gradient_are_the_named_ones(tiny):
    """The step's loss and gradient against the sum of the formula, written out."""
    from stars_fast import fused_jsrr
    from stars_fast.data.addition import AdditionData
    from stars_fast.data.batches import Batches
    from stars_fast.data.samples import sample_noise

    config = tiny(method="jsrr", penalty={"weight": 0.3})
    model = FAMILY.start(config.model, torch.float32, config.seed)[0]
    (batch,) = Batches(Sums(AdditionData(config.data)), config.seed, 16).window(0)
    plan = step.plan_step(config, 0)
    loss = step.StepLoss(LoopedLoop(model), config)
    got, _ = loss(batch, plan, 3, len(batch.labels))
    got_gradient = torch.autograd.grad(got, list(model.parameters()))

    h = model.prelude(batch.tokens)
    for _ in range(3):
        h = model.block(h)
    logits = model.head(model.coda(h)).flatten(0, 1)[batch.positions]
    token_loss = torch.nn.functional.cross_entropy(logits, batch.labels)
    mask = batch.samples.real
    v = sample_noise(h, batch.samples, config.seed, 0, range(16))
    want = 0.7 * token_loss + 0.3 * fused_jsrr(model.block, h, v=v, mask=mask)
    torch.testing.assert_close(got, want)
    want_gradient = torch.autograd.grad(want, list(model.parameters()))
    torch.testing.assert_close(got_gradient, want_gradient)


def test_steps_that_are_not_finite_are_skipped_and_counted(tiny, monkeypatch):
    calls = iter(range(100))
    real = looped_lm.token_loss

    def token_loss(*args):
        return real(*args) * (float("nan") if next(calls) in (4, 5) else 1.0)

    monkeypatch.setattr(looped_lm, "token_loss", token_loss)  # micro-batches of steps 2 (both)
    train_section = {"accumulation": 2, "save_every": 1, "keep": 0}
    config = tiny(train=train_section, memory={"recompute": "none"})
    folder = train(config).folder
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert (rows[2]["loss"], rows[2]["grad_norm"]) == (None, None)
    saved = checkpoints(folder / "checkpoints")
    before, during, after = (saved_tensors(saved[n]) for n in (2, 3, 4))
    assert all(torch.equal(during[name], value) for name, value in before.items())
    assert not all(torch.equal(during[name], value) for name, value in after.items())


def test_a_run_that_cannot_recover_stops_with_the_reason_and_its_weights(tiny, monkeypatch):
    config = tiny(train={"max_nonfinite": 3, "steps": 50})
    real = looped_lm.token_loss
    monkeypatch.setattr(looped_lm, "token_loss", lambda *args: real(*args) * float("inf"))
    with pytest.raises(TrainingFailure, match=r"step 3: .* last 3 steps was not finite"):
        train(config)
    model = load_model(find_model(config.out))
    initial = FAMILY.start(config.model, torch.float32, config.seed)[0]
    for one, other in zip(model.parameters(), initial.parameters(), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(looped_lm, "token_loss", real)
    assert train(config, resume=True).step == 50


def test_an_existing_run_is_not_overwritten(tiny):
    config = tiny()
    folder = train(config).folder
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"run exists; continue .* --resume, or choose .* --out"):
        train(config)
    with pytest.raises(ConfigError, match=r"as another run: optim\.lr was 0\.001 and is 0\.5"):
        train(tiny(optim={"lr": 0.5}), resume=True)
    assert before == {path: path.read_bytes() for path in before}


def test_a_folder_that_is_no_run_is_left_alone(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"exists|holds no config"):
            train(tiny(), resume=resume)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_a_mistake_leaves_no_folder(tiny, tmp_path):
    with pytest.raises(ValueError, match="multiple of accumulation"):
        train(tiny(train={"accumulation": 5}))
    assert not (tmp_path / "run").exists()


def test_resuming_before_the_first_checkpoint_starts_anew(tiny):
    config = tiny()
    rows = read_metrics(train(config, resume=True).folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_a_run_can_be_made_longer(tiny):
    train(tiny())
    folder = train(tiny(train={"steps": 9}), resume=True).folder
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(1, 10))


def test_files_of_sums_may_move_and_must_stay_the_same(tiny, tmp_path):
    pairs = 1 + np.stack(np.divmod(np.arange(60), 9), 1)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    write_jsonl(before / "train", pairs[:40])
    write_jsonl(before / "test", pairs[40:])

    def config(folder):
        return tiny(data={f"{name}_file": str(folder / name) for name in ("train", "test")})

    train(config(before))
    before.rename(after)
    assert train(config(after), resume=True).step == 6
    for name, rows, message in (
        ("test", pairs[41:], "held-out"),
        ("train", pairs[:39], "training"),
    ):
        write_jsonl(after / name, rows)
        with pytest.raises(ConfigError, match=f"the {message} data are not those"):
            train(config(after), resume=True)


def test_micro_batches_may_be_smaller_from_here_on(tiny, capsys):
    train(tiny(train={"steps": 2}))
    capsys.readouterr()
    outcome = train(tiny(train={"steps": 4, "micro_batch_size": 4}), resume=True)
    said = capsys.readouterr().err
    assert "train.micro_batch_size was None and is 4" in said
    assert "is of 1 micro-batch a step on each process and 4 go on" in said
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    straight = read_metrics(train(tiny(out=f"{outcome.folder}-2")).folder / "metrics.jsonl")
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in straight[:4]]
    train(tiny(train={"steps": 5, "accumulation": 4}), resume=True)
    assert "a step on each process" not in capsys.readouterr().err


def test_lines_are_means_over_their_interval(tiny, tmp_path):
    for name, every in (("one", 1), ("three", 3)):
        train(tiny(out=str(tmp_path / name), train={"log_every": every, "steps": 6}))
    one, three = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "three"))
    assert [row["step"] for row in three] == [3, 6]
    for name in ("loss", "penalty", "grad_norm", "depth"):
        means = [sum(row[name] for row in one[i : i + 3]) / 3 for i in (0, 3)]
        assert [row[name] for row in three] == pytest.approx(means)


@pytest.mark.usefixtures("figures")
def test_accuracy_is_evaluated_during_and_at_the_end(tiny):
    config = tiny(eval={"turns": [1, 4], "every": 2, "limit": 21})
    folder = train(config).folder
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "accuracy" in row] == [2, 4]
    results = json.loads((folder / "results.json").read_text())
    assert results["step"] == 6
    assert results["accuracy"].keys() == {"1", "4"}
    for figure in ("accuracy.png", "training.png"):
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")


def test_evaluation_does_not_change_the_course(tiny, tmp_path):
    plain = train(tiny(out=str(tmp_path / "plain"), model={"dropout": 0.1})).folder
    evaluated = tiny(out=str(tmp_path / "eval"), model={"dropout": 0.1}, eval={"every": 2})
    other = weights(train(evaluated).folder)
    assert all(torch.equal(value, other[name]) for name, value in weights(plain).items())


def test_the_start_is_noted_with_its_environment(tiny):
    folder = train(tiny()).folder
    (line,) = (folder / "environment.jsonl").read_text().splitlines()
    note = json.loads(line)
    assert note["torch"] == torch.__version__
    assert (note["threads"], note["processes"]) == (1, 1)
