"""What does not fit into a run is said with what happens then."""

import shutil
from pathlib import Path

import pytest

from stars_fast.cli import main
from stars_fast.training.config import load_config
from stars_fast.training.run.trainer import train
from stars_fast.training.step.optim import learning_rate
from stars_fast.training.step.schedule import beyond_the_end

SMOKE = """
    --d_model 16 --n_heads 2 --d_ff 16 --digits 1 --train_samples 30 --test_samples 9
    --batch_size 8 --eval.turns 1 --report_to none --steps
""".split()


def notes(*words):
    return beyond_the_end(load_config("addition-quick-stars", [*SMOKE, *words]))


def test_a_recipe_in_its_own_steps_has_nothing_to_say():
    assert notes("3200") == []
    for recipe in ("addition", "addition-quick-l2", "addition-quick-sft"):
        assert beyond_the_end(load_config(recipe)) == []


def test_the_warm_up_and_the_decay_of_a_smoke_run():
    config = load_config("addition-quick-stars", [*SMOKE, "60"])
    peak = max(learning_rate(config.optim, step, 60) for step in range(60))
    found = beyond_the_end(config)
    assert found[0].startswith(
        "optim.warmup_steps (100) and optim.decay_steps (2,000) take more than the run's 60 steps: "
        f"the learning rate gets to {peak / 2e-3:.2g} of optim.lr at most"
    )
    assert peak < 2e-3
    assert found[
        1
    ] == "penalty.start_step (1,200) is not before the last of the run's 60 steps: " + (
        "no penalty"
    )
    assert len(found) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("50 --schedule cosine --start_step 0 --ramp_steps 0", "optim.warmup_steps (100)"),
        ("2050 --start_step 0", "and optim.decay_steps (2,000) take more than the run's 2,050"),
        ("60 --warmup_steps 0 --decay_steps 61 --method sft --law fixed", "optim.decay_steps (61)"),
        (
            "60 --warmup_steps 0 --decay_steps 0 --start_step 30 --ramp_steps 60",
            "penalty.start_step + ramp_steps (90) is more than the run's 60 steps: lambda ends at "
            "0.1 instead of 0.2",
        ),
        (
            "60 --warmup_steps 0 --decay_steps 0 --start_step 0 --ramp_steps 0 "
            "--curriculum_steps 600",
            "depth.curriculum_steps (600) is more than the run's 60 steps: the mean depth ends at",
        ),
        (
            "60 --warmup_steps 0 --decay_steps 0 --start_step 0 --ramp_steps 0 --eval.every 61",
            "eval.every (61) is more than the run's 60 steps: it is evaluated at the end alone",
        ),
    ],
)
def test_each_schedule_that_does_not_end_is_named(words, message):
    (found,) = notes(*words.split())
    assert message in found


@pytest.mark.parametrize(
    "words",
    [
        "60 --warmup_steps 0.1 --decay_steps 0.9 --start_step 0 --ramp_steps 60",
        "60 --warmup_steps 20 --decay_steps 40 --start_step 0 --ramp_steps 0 --eval.every 60",
        "60 --warmup_steps 20 --schedule cosine --start_step 59 --ramp_steps 0",
        "60 --warmup_steps 60 --decay_steps 0 --start_step 0 --ramp_steps 1 --curriculum_steps 60",
        "60 --warmup_steps 0 --decay_steps 0 --penalty.weight 0",
    ],
)
def test_what_just_fits_is_silent(words):
    assert notes(*words.split()) == []


def test_the_run_says_it(tmp_path, capsys):
    assert main(["train", "addition-quick-stars", *SMOKE, "2", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert "warning: optim.warmup_steps (100) and optim.decay_steps (2,000) take more" in said
    assert "warning: penalty.start_step (1,200) is not before the last" in said


# -- nothing to resume


def test_resuming_where_there_is_no_run_is_a_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "addition-quick-stars", *SMOKE, "2", "--out", "runs/small"]) == 0
    capsys.readouterr()
    (tmp_path / "runs" / "empty").mkdir()
    for words, message in (
        (["addition-quick-stars", "--out", "runs/smal"], "runs/smal does not exist"),
        (["addition-quick-stars", "--out", "elsewhere"], "elsewhere does not exist"),
        (["addition-quick-stars", "--out", "runs/empty"], "runs/empty is empty"),
        (["addition-quick-stars"], "runs/addition-quick-stars does not exist"),
        (["runs/smol"], "runs/smol does not exist"),
    ):
        assert main(["train", *words, "--resume"]) == 2
        said = capsys.readouterr().err
        assert f"--resume: {message}, so there is no run to continue" in said
        assert "the nearest run folder is runs/small" in said
        assert said.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["empty", "small"]
    assert not (tmp_path / "elsewhere").exists()


def test_without_any_run_none_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "addition-quick-stars", "--resume"]) == 2
    said = capsys.readouterr().err
    assert "does not exist, so there is no run to continue; to start a new run" in said


def test_a_run_that_stopped_before_its_first_checkpoint_says_that_it_begins_again(tiny, capsys):
    train(tiny(), resume=True)
    assert "; starts\n" in capsys.readouterr().err
    folder = tiny().out
    shutil.rmtree(Path(folder) / "checkpoints")
    (Path(folder) / "results.json").unlink(missing_ok=True)
    (Path(folder) / "metrics.jsonl").unlink()
    (Path(folder) / "checkpoints" / "writing-000004").mkdir(parents=True)
    train(tiny(), resume=True)
    said = capsys.readouterr().err
    assert "; starts anew, as there is no checkpoint to continue from\n" in said
