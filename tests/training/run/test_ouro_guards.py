"""What a run of the Ouro trainer refuses, and what it says before it starts."""

import json

import numpy as np
import pytest
import torch
from ouro_runs import ouro_run

from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.base.seeds import derive
from stars_fast.data.tiny_chat import write_tiny_chats
from stars_fast.evaluation import benchmarks
from stars_fast.training.config import LoopConfig, load_config
from stars_fast.training.run import in_training, trainer
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.trainer import train
from stars_fast.training.scale.distributed import World


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path, cache):
    return lambda **changes: ouro_run(tmp_path / "run", cache, **changes)


def test_a_run_does_not_go_on_with_other_data(run, tmp_path):
    source = tmp_path / "chats.jsonl"
    write_tiny_chats(source, 60, 0)
    short = {"steps": 2, "save_every": 2}
    train(run(data={"source": str(source), "samples": None}, train=short))
    write_tiny_chats(source, 60, 1)
    longer = run(data={"source": str(source), "samples": None}, train={**short, "steps": 4})
    with pytest.raises(ConfigError, match=r"training data are not those that .*step-000002"):
        train(longer, resume=True)
    write_tiny_chats(source, 60, 0)
    assert train(longer, resume=True).step == 4


@pytest.mark.slow
def test_a_run_goes_on_where_its_data_lie_now(run, tmp_path):
    source, validation = tmp_path / "chats.jsonl", {"validation": 5, "samples": None}
    write_tiny_chats(source, 60, 0)
    short = {"steps": 2, "save_every": 2}
    train(run(data=validation | {"source": str(source)}, train=short))
    moved = source.rename(tmp_path / "elsewhere.jsonl")
    config = run(data=validation | {"source": str(moved)}, train={**short, "steps": 4})
    assert train(config, resume=True).step == 4
    rows = moved.read_text().splitlines(keepends=True)
    drawn = np.random.default_rng(derive(config.seed, "data") % 2**32).permutation(len(rows))
    for row, name in ((drawn[0], "held-out"), (drawn[-1], "training")):
        others = [*rows[:row], rows[row].replace("What is", "What was"), *rows[row + 1 :]]
        moved.write_text("".join(others))
        with pytest.raises(ConfigError, match=rf"the {name} data are not those"):
            train(config, resume=True)


@pytest.mark.parametrize(
    ("budget", "choice"),
    [(None, "keeps all activations"), (0.001, "recomputes"), (1e-6, "warning")],
)
def test_what_is_recomputed_follows_from_the_budget(run, capsys, budget, choice):
    folder = train(run(method="stars", train={"steps": 1}, memory={"budget": budget})).folder
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("at ")]
    assert [line.split()[1] for line in lines] == ["3", "5"]  # the usual number of turns, the most
    assert choice in lines[-1]
    assert read_metrics(folder / "metrics.jsonl")[-1]["step"] == 1


def test_a_budget_does_not_change_the_run(run, tmp_path):
    rows = []
    for name, budget in (("all", None), ("little", 0.001)):
        folder = train(run(out=str(tmp_path / name), memory={"budget": budget})).folder
        rows.append(
            [(row["loss"], row["penalty"]) for row in read_metrics(folder / "metrics.jsonl")]
        )
    assert rows[0] == rows[1]


def test_a_fraction_of_one_sample_is_the_whole(run, capsys):
    penalty = {"at": "last", "detach": False, "fraction": 0.25}
    one_row = {"steps": 1, "batch_size": 4, "micro_batch_size": 1}
    train(run(method="jsrr", data={"packing": False}, penalty=penalty, train=one_row))
    said = capsys.readouterr().err
    assert "penalty.fraction is 1.00 rather than 0.25" in said
    whole = load_config("ouro-tiny-jsrr", ["--at", "last", "--detach", "false"])
    assert whole.penalty.fraction == 1.0


def test_accumulation_follows_from_the_micro_batch_and_must_not_contradict_it():
    assert LoopConfig(batch_size=16, micro_batch_size=2).on(2).accumulation == 4
    assert LoopConfig(batch_size=16, accumulation=4).on(2).accumulation == 4
    with pytest.raises(ValueError, match=r"multiple of micro_batch_size x processes = 3 x 2"):
        LoopConfig(batch_size=16, micro_batch_size=3).on(2)
    with pytest.raises(ValueError, match=r"accumulation: expected none .* or 4 .* got 3"):
        LoopConfig(batch_size=16, micro_batch_size=2, accumulation=3).on(2)


def test_epochs_or_steps_say_the_steps():
    assert LoopConfig(epochs=1, batch_size=4).over(10).total_steps == 3
    assert LoopConfig(epochs=2.5, batch_size=4).over(10).total_steps == 7
    assert LoopConfig(steps=5).over(10).total_steps == 5
    with pytest.raises(ValueError, match=r"epochs: expected none beside steps, 5, got 1"):
        LoopConfig(epochs=1, steps=5)
    assert LoopConfig().over(10).total_steps == 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"batch_size": 3, "accumulation": 2}}, r"multiple of accumulation x processes"),
        ({"parallel": {"kind": "hsdp", "shard": 3}}, r"parallel\.shard"),
        ({"train": {"report_to": ["wandb"]}}, r"metrics need wandb: pip install wandb"),
        (
            {
                "train": {"batch_size": 4, "micro_batch_size": 2},
                "penalty": {"draw": "micro-batches", "fraction": 0.25},
            },
            r"penalty: fraction: expected a whole number of the 1 micro-batches .* got 0\.25",
        ),
    ],
)
def test_mistakes_are_found_before_data_and_model(run, tmp_path, monkeypatch, changes, message):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    config = run(**changes)
    with pytest.raises(ConfigError, match=message):
        trainer.check(config, World(0, 2, torch.device("cpu")), RunFolder(config.out), False)


def test_a_sharded_shared_turn_on_a_part_does_not_gather_anew(run):
    shared = {"at": "last", "detach": False, "fraction": 0.5}
    with pytest.raises(
        ConfigError, match=r"parallel\.reshard: expected false with penalty\.at last"
    ):
        run(penalty=shared, parallel={"kind": "fsdp", "reshard": True})
    run(penalty=shared, parallel={"kind": "fsdp"})
    run(penalty=shared | {"draw": "micro-batches"}, parallel={"kind": "fsdp", "reshard": True})


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_recommended_recipe_draws_micro_batches_on_so_many_processes(processes):
    config = load_config("ouro-numina-fast")
    window = config.train.on(processes).accumulation
    assert config.penalty.micro_batches(window) == window / 4


def test_a_step_before_the_last_turn_needs_its_states(run):
    penalty = {"at": "last", "detach": False, "direction": "step"}
    with pytest.raises(ConfigError, match=r"train\.backprop_turns: expected at least 2"):
        run(penalty=penalty, train={"backprop_turns": 1})
    run(penalty=penalty, train={"backprop_turns": 2})


def test_a_failing_evaluation_does_not_end_the_run(run, monkeypatch, capsys):
    def fails(*_):
        raise OSError("no network")

    monkeypatch.setattr(benchmarks, "check_tasks", lambda *_: None)
    monkeypatch.setattr(in_training, "run_tasks", fails)
    evaluation = {"turns": [1, 2], "tasks": ["gsm8k"]}
    folder = train(run(train={"steps": 2}, data={"validation": 8}, eval=evaluation)).folder
    assert "lm-eval failed, the run goes on: OSError: no network" in capsys.readouterr().err
    results = json.loads((folder / "results.json").read_text())
    assert results["validation_loss"].keys() == {"1", "2"}


def test_a_mistake_of_one_process_is_one_of_all():
    def fails():
        raise ConfigError("wrong")

    world = World(0, 1, torch.device("cpu"))
    assert world.together(lambda: 3) == 3
    with pytest.raises(ConfigError, match="wrong"):
        world.together(fails)
