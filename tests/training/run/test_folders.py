"""A run folder is what the command line names, wherever it lies; what can't go on says so."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.cli import main
from stars_fast.training.config import load_config, save_config
from stars_fast.training.run.changed import changed_settings
from stars_fast.training.run.metrics import read_metrics

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "restarted.py")
SMALL = """
    --d_model 16 --n_heads 2 --d_ff 16 --digits 1 --train_samples 30 --test_samples 9 --steps 2
    --batch_size 8 --warmup_steps 0 --decay_steps 0 --start_step 1 --eval.turns 1 --log_every 1
    --report_to none
""".split()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "addition-quick-stars", *SMALL, "--out", "runs/tiny"]) == 0
    return tmp_path / "runs" / "tiny"


def steps(folder):
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def test_resume_goes_on_in_the_folder_it_is_given(run, monkeypatch):
    moved = run.parent.parent / "moved"
    shutil.copytree(run, moved)
    assert main(["train", "moved", "--resume", "--steps", "3"]) == 0
    assert steps(moved) == [1, 2, 3]
    assert steps(run) == [1, 2]
    monkeypatch.chdir(run.parent)
    assert main(["train", "tiny", "--resume", "--steps", "4"]) == 0
    assert steps(run) == [1, 2, 3, 4]
    assert not (run.parent / "runs").exists()


def test_one_command_starts_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = [*SMALL, "--out", "auto"]
    assert main(["train", "addition-quick-stars", *place, "--dry-run", "--resume=auto"]) == 0
    assert "folder   auto: new" in capsys.readouterr().out
    assert main(["train", "--resume", "auto", "addition-quick-stars", *place]) == 0
    assert "; starts\n" in capsys.readouterr().err
    assert main(["train", "addition-quick-stars", *place, "--dry-run", "--resume", "auto"]) == 0
    assert "folder   auto: continues" in capsys.readouterr().out
    assert main(["train", "addition-quick-stars", *place, "--resume", "auto"]) == 0
    assert "continues after step 2" in capsys.readouterr().err
    assert main(["train", "addition-quick-stars", "--seed", "1", *place, "--resume", "auto"]) == 2
    assert "as another run: seed was 0 and is 1" in capsys.readouterr().err
    # A folder of that name
    assert main(["train", "--resume", "auto", "--steps", "3"]) == 0
    assert steps(tmp_path / "auto") == [1, 2, 3]
    assert main(["train", "auto", "--resume=always"]) == 2
    assert "--resume: expected auto or no value, got 'always'" in capsys.readouterr().err


def test_a_restart_does_not_take_a_run_that_it_did_not_begin(run, monkeypatch, capsys):
    """torchrun starts again what was refused."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["train", "addition-quick-stars", *SMALL, "--out", str(run)]) == 2
    assert "exists; continue that run with --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_that_torchrun_starts_again_go_on(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    train = ["train", "addition-quick-stars", *SMALL, "--save_every=1", f"--out={tmp_path / 'run'}"]
    train.append("--resume=auto")
    words = [*torchrun, "--nproc-per-node=2", SCRIPT, *train]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert steps(tmp_path / "run") == [1, 2]
    assert len((tmp_path / "run/environment.jsonl").read_text().splitlines()) == 2


def test_a_resumed_run_says_what_has_changed(run, capsys):
    told = capsys.readouterr()
    assert "changed settings" not in told.out + told.err
    assert main(["train", str(run), "--resume"]) == 0
    told = capsys.readouterr()
    assert "changed settings" not in told.out + told.err
    words = ["--resume", "--steps", "4", "--decay_steps", "0", "--keep", "3"]
    assert main(["train", str(run), *words]) == 0
    told = " ".join(capsys.readouterr()).replace("\n", " ")
    assert "changed settings: train.steps was 2 and is 4; train.keep was 2 and is 3" in told
    assert "optim.lr" not in told  # wsd without a decay: it is constant
    assert main(["train", str(run), "--resume", "--epochs", "2"]) == 0
    told = " ".join(capsys.readouterr())
    assert "train.steps was 4 and is None; train.epochs was None and is 2.0" in told
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_step_is_named_from_which_the_learning_rate_is_another(tmp_path):
    """A wsd schedule of more steps is the same up to where the shorter one begins to fall."""
    words = ["--schedule", "wsd", "--decay_steps", "2000", "--lr", "2e-3", "--steps"]
    run = RunFolder(tmp_path)
    save_config(load_config("addition-quick-stars", [*words, "3200"]), run.config)
    longer = load_config("addition-quick-stars", [*words, "6400"])
    lines = changed_settings(run, longer, 100, 1000)
    assert lines[1].endswith("at 0.002 in step 1,210 rather than 0.00199, of 3,200 steps")
    assert changed_settings(run, longer, 1300, 1000)[1].endswith(
        "6,400 steps, at 0.002 rather than 0.0019, of 3,200 steps"
    )


def test_a_longer_schedule_says_what_it_does_to_the_learning_rate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--schedule", "cosine", "--lr", "1e-3", "--out", "c"]
    assert main(["train", "addition-quick-stars", *words]) == 0
    capsys.readouterr()
    assert main(["train", "c", "--resume", "--steps", "6"]) == 0
    said = " ".join(capsys.readouterr())
    assert (
        "warning: optim.lr goes on by the schedule of 6 steps, at 0.000655, after the schedule of "
        "2 steps had come to 0" in said
    )
    shutil.rmtree(tmp_path / "c/checkpoints/step-000006")
    assert main(["train", "c", "--resume", "--steps", "4"]) == 0
    assert "at 0.00025 rather than 0.000655, of 6 steps" in " ".join(capsys.readouterr())


def test_a_batch_of_more_than_the_data_is_announced(run, capsys):
    assert "is more than" not in capsys.readouterr().err
    few = ["--train_samples", "5", "--out", "few"]
    words = [word for word in SMALL if word not in ("--train_samples", "30")]
    assert main(["train", "addition-quick-stars", *words, *few]) == 0
    said = capsys.readouterr().err
    assert (
        "warning: train.batch_size (8) is more than the 5 1-digit sums to train on: a step takes "
        "the same ones 1.6 times on average" in said
    )


@pytest.mark.parametrize("words", [["--steps", "1"], ["--epochs", "0.1"]])
def test_fewer_steps_than_done_are_refused(run, capsys, words):
    assert main(["train", str(run), "--resume", *words]) == 2
    said = capsys.readouterr().err
    assert "train.steps: expected at least the 2 steps that the run" in said
    assert said.rstrip().endswith("got 1")
    assert load_config(str(run)).train.steps == 2


def test_a_finished_run_without_checkpoints_is_not_overwritten(run, capsys):
    shutil.rmtree(run / "checkpoints")
    assert main(["train", str(run), "--resume"]) == 2
    assert "can't continue" in capsys.readouterr().err
    assert steps(run) == [1, 2]


@pytest.mark.parametrize("field", ["penalty.weight", "clip", "weight_decay", "lr", "eps"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(field, value):
    with pytest.raises(ConfigError, match=field.rpartition(".")[2]):
        load_config("addition-quick-stars", [f"--{field}", value])


def test_user_errors_have_no_traceback(tmp_path, run, capsys):
    file = tmp_path / "file"
    file.write_text("x")
    assert main(["train", "addition-quick-stars", *SMALL, "--out", str(file)]) == 2
    (tmp_path / "base.yaml").write_text("base: 3\n")
    assert main(["train", str(tmp_path / "base.yaml")]) == 2
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["train", str(tmp_path / "bytes.yaml")]) == 2
    weights = next(run.glob("checkpoints/*/*.distcp"))
    weights.write_bytes(weights.read_bytes()[:40])
    assert main(["eval", str(run), "--turns", "1"]) == 2
    assert "Traceback" not in capsys.readouterr().err
