"""Whole runs of the Ouro trainer in one process: resumed, judged, compiled, exported, refused."""

import json
import re
import sys
import time
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from ouro_runs import ouro_run, rows_of
from torch import nn
from torch.nn.functional import cross_entropy

from stars_fast import cli
from stars_fast.base.checkpoints import latest, saved_tensors
from stars_fast.training.config import save_config
from stars_fast.training.run import trainer
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.progress import Progress
from stars_fast.training.run.task import Task
from stars_fast.training.run.trainer import train
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.train_step import StepStats

SMALL = {"path": "tiny", "width": 16, "layers": 1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def ouro(tmp_path, cache):
    """ouro(name, **changes) -> the configuration of a run in tmp_path/name."""
    return lambda name="run", **changes: ouro_run(tmp_path / name, cache, **changes)


class Lost(Exception):
    """Ends a run in the middle of it, as a kill would."""


@pytest.fixture
def lost_at(monkeypatch):
    """lost_at(n, config): train until step n begins, and lose all since the last checkpoint."""
    real = trainer.train_step

    def begin(number, config):
        def train_step(*args):
            if args[4].step == number:
                raise Lost
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(trainer, "train_step", train_step)
            with pytest.raises(Lost):
                train(config)

    return begin


def assert_same_tensors(run, other):
    """All that the last checkpoints hold, weights and optimiser, bit for bit."""
    one, two = (saved_tensors(latest(Path(each) / "checkpoints")) for each in (run, other))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


TEN_STEPS = {
    "depth": {"stratified": True, "curriculum_steps": 8, "curriculum_start": 1.5},
    "penalty": {"start_step": 2, "ramp_steps": 5, "fraction": 0.5},
    "optim": {"warmup_steps": 3},
    "train": {"steps": 10, "accumulation": 2, "save_every": 5},
}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_ten_steps_are_five_and_a_loss_and_five_more(ouro, lost_at, packing):
    data = {"packing": packing, "samples": 30}
    straight, lost = (ouro(name, data=data, **TEN_STEPS) for name in ("straight", "lost"))
    train(straight)
    lost_at(7, lost)
    train(lost, resume=True)
    rows = rows_of(straight.out)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert len({row["depth"] for row in rows}) > 2
    assert rows_of(lost.out) == rows
    assert_same_tensors(straight.out, lost.out)

    units = len(Task(lost, World(0, 1, torch.device("cpu"))).data.source)
    assert 5 * 4 % units  # the checkpoint was in the middle of an epoch
    assert units < 10 * 4


@pytest.mark.parametrize("method", ["sft", "random-loop", "jsrr", "stars"])
def test_every_method_lowers_its_loss(ouro, method):
    config = ouro(method=method, model=SMALL, train={"steps": 30}, optim={"lr": 0.01})
    rows = read_metrics(train(config).folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert sum(row["loss"] for row in rows[-5:]) < 0.8 * sum(row["loss"] for row in rows[:5])
    penalised = method in ("jsrr", "stars")
    assert all((row["penalty"] is not None) == penalised for row in rows)
    assert all(row["lambda"] == (0.1 if penalised else 0.0) for row in rows)
    depths = {row["depth"] for row in rows}
    assert depths == {3} if method in ("sft", "jsrr") else len(depths) > 1


def test_evaluation_is_written_and_does_not_change_the_course(ouro):
    data = {"validation": 10}
    plain = train(ouro("plain", model=SMALL, data=data)).folder
    evaluated = ouro("evaluated", model=SMALL, data=data, eval={"turns": [1, 4], "every": 2})
    folder = train(evaluated).folder
    rows = rows_of(folder)
    assert [row["step"] for row in rows if "validation_loss" in row] == [2, 4]
    for row in rows:
        assert row.pop("validation_loss", {"1": 0, "4": 0}).keys() == {"1", "4"}
    assert rows == rows_of(plain)
    assert_same_tensors(plain, folder)
    assert not (plain / "results.json").exists()


def test_the_export_of_a_run_is_the_model_that_was_judged(ouro, tmp_path, capsys):
    """The weights are those of the last checkpoint; called one chat after the other they have the
    validation loss that the run wrote down."""
    from transformers import AutoTokenizer

    from stars_fast.models.ouro import OuroForCausalLM

    config = ouro(model=SMALL, data={"validation": 5}, eval={"turns": [1, 3]})
    run = train(config).folder
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    model = OuroForCausalLM.from_pretrained(tmp_path / "out").eval()
    saved = saved_tensors(latest(run / "checkpoints"))
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert weights.keys() == {name for name in saved if name.startswith("model.")}
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())
    assert model.config.total_ut_steps == 4

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert "<|im_start|>user\nhi<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    results = json.loads((run / "results.json").read_text())
    assert results["step"] == 6
    task = Task(config, World(0, 1, torch.device("cpu")))
    for turns in (1, 3):
        total = count = 0
        for number in range(5):
            tokens, targets, _ = task.data.held_out.batch([number])
            with torch.no_grad():
                logits = model(tokens, turns=turns).logits[0]
            kept = targets[0] >= 0
            total += float(cross_entropy(logits[kept], targets[0][kept], reduction="sum"))
            count += int(kept.sum())
        assert results["validation_loss"][str(turns)] == pytest.approx(total / count, rel=1e-5)

    capsys.readouterr()
    assert cli.main(["eval", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("stars-fast: ")
    assert "ouro" in said.lower()


@pytest.mark.slow
def test_compiled_layers_give_the_same_losses(ouro, monkeypatch):
    """With the graphs of forward and backward as they are captured, for one length and for any, but
    without C++ made of them, which takes a minute."""
    compile_ = partialmethod(nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(nn.Module, "compile", compile_)
    found = {}
    for compiled in (False, True):
        config = ouro(
            f"compiled-{compiled}",
            method="jsrr",
            model=SMALL,
            data={"packing": False},
            depth={"value": 2},
            train={"steps": 3, "compile": compiled},
            memory={"recompute": "none"},
        )
        found[compiled] = read_metrics(train(config).folder / "metrics.jsonl")
    for plain, row in zip(found[False], found[True], strict=True):
        for figure in ("loss", "penalty", "grad_norm"):
            assert row[figure] == pytest.approx(plain[figure], rel=1e-5), figure


def test_the_remaining_time_is_right_within_a_fifth_after_ten_steps(ouro, monkeypatch):
    """Of a run whose steps take as long as their depth asks for, by a clock that stands still
    otherwise: on a machine that does other work, real steps take now so long and now so long."""
    shown, clock = {}, [0.0]

    def train_step(step_loss, optimizer, config, window, plan, world):
        depth = sum(plan.turns) / len(plan.turns)
        clock[0] += 0.2 if plan.step == 0 else 0.004 * (depth + 2.5)  # the first also warms up
        one = torch.ones(())
        return StepStats(one, one, one, 100, one.bool())

    def show(progress, row):
        shown[row["step"]] = (clock[0], progress.remaining.after_step(row["step"] - 1))

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(trainer, "train_step", train_step)
    monkeypatch.setattr(Progress, "show", show)
    train(ouro(model=SMALL, depth={"mu": 1.7, "high": 16}, train={"steps": 60}))
    (then, expected), (end, last) = shown[10], shown[60]
    assert expected == pytest.approx(end - then, rel=0.2)
    assert last == 0.0


MISTAKES = {
    "a wrong column": (
        ["--data.prompt", "ask", "--data.answer", "tell"],
        r"data\.prompt: expected one of the columns .* got 'ask'",
    ),
    "a missing file": (
        ["--data.source", "no/such.jsonl"],
        r"data\.source: expected .*such\.jsonl'",
    ),
    "a batch that does not divide": (
        ["--batch_size", "5", "--accumulation", "2"],
        r"batch_size: expected a multiple of accumulation x processes = 2 x 1, got 5",
    ),
    "a batch that its parts do not divide": (
        ["--batch_size", "5", "--micro_batch_size", "2"],
        r"batch_size: expected a multiple of micro_batch_size x processes = 2 x 1, got 5",
    ),
    "no target": (["--max_length", "4"], r"data\.source: no row for train has a token to predict"),
    "last with detach": (["--penalty.at", "last"], r"penalty: detach: expected false with at=last"),
    "no such model": (["--model.path", "no/such/model"], r"model\.path.*no/such/model"),
    "a folder without a model": (["--model.path", "{here}"], r"model\.path.*{here}"),
    "lm-eval on shards": (
        ["--parallel.kind", "fsdp", "--eval.turns", "2", "--eval.tasks", "gsm8k"],
        r"eval\.tasks: expected none with parallel\.kind fsdp",
    ),
    "no lm-eval": (
        ["--eval.turns", "2", "--eval.tasks", "gsm8k"],
        r"eval\.tasks need lm-eval: pip install",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named_at_once_and_leaves_no_folder(ouro, tmp_path, monkeypatch, capsys, case):
    words, message = MISTAKES[case]
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    monkeypatch.setattr(trainer, "train_step", lambda *_: pytest.fail("a step was taken"))
    recipe = tmp_path / "recipe.yaml"
    save_config(ouro(), recipe)
    words = [word.format(here=tmp_path) for word in words]
    assert cli.main(["train", str(recipe), *words]) == 2
    said = capsys.readouterr().err
    expected = "stars-fast: .*" + message.replace("{here}", re.escape(str(tmp_path)))
    assert re.search(expected, said, re.DOTALL)
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
