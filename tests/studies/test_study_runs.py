"""A study from the command: what is trained, what is kept, what is refused, what is written."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stars_fast import cli
from stars_fast.training.run import trainer
from stars_fast.training.run.checkpoint import Checkpoints
from studies import runner

SCRIPT = str(Path(__file__).parent / "scripts" / "tiny_study.py")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
TWO = ["--only", "*LayerNorm"]
MEASURED = ("seconds", "machine")
"""What differs from one time to the next."""


def study(out, *words):
    return cli.main(["study", "tiny", "--out", str(out), *words])


def written(out):
    """study.json without what is measured anew."""
    content = json.loads((out / "study.json").read_text())
    for entry in content["runs"]:
        for name in MEASURED:
            entry.pop(name, None)
    return content


@pytest.fixture
def trained(monkeypatch):
    """The names of the runs that were trained, as they come."""
    names = []

    def train(config, resume):
        names.append(config.name)
        return trainer.train(config, resume)

    monkeypatch.setattr(runner, "train", train)
    return names


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of the study as a process left it that was killed in the second run's fifth
    step."""
    out = tmp_path_factory.mktemp("studies") / "killed"
    words = ["post-layernorm-0", "5", "--out", str(out), *TWO]
    ended = subprocess.run([sys.executable, SCRIPT, *words], env=ONE_THREAD)
    assert ended.returncode == -signal.SIGKILL
    assert not (out / "study.json").exists()
    assert not (out / "post-layernorm-0" / "results.json").exists()
    return out


@pytest.mark.slow
def test_after_a_kill_the_rest_is_done_and_the_numbers_are_the_same(
    tiny, killed, tmp_path, trained, capsys
):
    assert study(killed, *TWO) == 0
    assert trained == ["post-layernorm-0"]
    # The last checkpoint may have been in the making.
    resumed = r"post-layernorm-0, 1 x cpu with 1 thread; continues after step [24]"
    assert re.search(resumed, capsys.readouterr().err)
    trained.clear()
    assert study(tmp_path / "straight", *TWO) == 0
    assert len(trained) == 2
    assert written(killed) == written(tmp_path / "straight")

    trained.clear()
    judged = {path: path.stat().st_mtime_ns for path in killed.glob("*/judged.json")}
    assert len(judged) == 2
    assert study(killed, *TWO) == 0
    assert trained == []
    assert judged == {path: path.stat().st_mtime_ns for path in judged}

    content = written(killed)
    assert content["scale"] == "quick"
    entry = content["runs"][2]
    assert entry["levels"] == {"placement": "post", "norm": "LayerNorm"}
    assert list(map(int, entry["accuracy"])) == list(range(1, 101))
    for name in ("radius", "contracting", "settled"):
        assert entry[name].keys() == {"4", "16", "64"}
    assert all(value > 0 for value in entry["rms"].values())
    assert json.loads((killed / "study.json").read_text())["runs"][0]["machine"]["torch"]
    table = (killed / "table.md").read_text()
    assert "| post | LayerNorm | 2 |" in table
    assert "- pre, RMSNorm, seed 0: missing" in table
    assert "**Finding 1: not judged.**" in table
    assert (killed / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_processes_of_torchrun_train_together_and_one_writes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    words = ["none", "0", "--out", str(tmp_path), "--only", "pre, LayerNorm"]
    ended = subprocess.run([*command, "2", SCRIPT, *words], env=ONE_THREAD, capture_output=True)
    assert ended.returncode == 0
    assert ended.stdout.decode().count("[1/1] pre, LayerNorm, seed 0") == 1
    notes = (tmp_path / "pre-layernorm-0" / "environment.jsonl").read_text().splitlines()
    assert [json.loads(note)["processes"] for note in notes] == [2]
    statuses = [entry["status"] for entry in written(tmp_path)["runs"]]
    assert statuses == ["done", "missing", "missing", "missing"]


def test_another_definition_is_refused_with_the_run_and_the_field(tiny, tmp_path, trained, capsys):
    assert study(tmp_path, "--only", "pre, LayerNorm", "--train.steps", "2") == 0
    assert trained == ["pre-layernorm-0"]
    assert study(tmp_path, "--train.steps", "3", "--optim.lr", "0.1") == 2
    said = capsys.readouterr().err
    assert "pre-layernorm-0 holds another run than the study's now, pre, LayerNorm, seed 0" in said
    assert "optim.lr was 0.002 and is 0.1; train.steps was 2 and is 3" in said
    assert trained == ["pre-layernorm-0"]
    assert study(tmp_path, "--only", "pre, *", "--train.steps", "2", "--log_every", "1") == 0
    assert trained == ["pre-layernorm-0", "pre-rmsnorm-0"]
    assert "not judged" in capsys.readouterr().out


def test_a_run_that_fails_is_recorded_and_the_others_go_on(tiny, tmp_path, trained, capsys):
    hopeless = ["--optim.lr", "1e38", "--warmup_steps", "0", "--max_nonfinite", "1"]
    hopeless += ["--only", "* RMSNorm", "--steps", "4"]
    assert study(tmp_path, *hopeless) == 1
    assert trained == ["pre-rmsnorm-0", "post-rmsnorm-0"]
    said = capsys.readouterr().out
    folder = tmp_path / "pre-rmsnorm-0"
    assert (
        f"failed: pre, RMSNorm, seed 0; remove {folder / 'failed.json'} to go on from its last "
        f"checkpoint, or {folder} to start anew"
    ) in said
    entries = {entry["label"]: entry for entry in written(tmp_path)["runs"]}
    assert entries["pre, RMSNorm"]["status"] == "failed"
    assert "not finite" in entries["pre, RMSNorm"]["failed"]
    assert entries["pre, LayerNorm"]["status"] == "missing"
    assert "pre, RMSNorm, seed 0: failed: stopped at step" in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "figure.png").exists()
    assert study(tmp_path, *hopeless) == 1
    assert trained == ["pre-rmsnorm-0", "post-rmsnorm-0"]
    (folder / "failed.json").unlink()
    assert study(tmp_path, *hopeless) == 1
    assert trained == ["pre-rmsnorm-0", "post-rmsnorm-0", "pre-rmsnorm-0"]
    assert re.search(
        r"pre-rmsnorm-0, 1 x cpu with 1 thread; continues after step \d", capsys.readouterr().err
    )


def test_a_folder_without_a_configuration_counts_as_new(tiny, tmp_path, trained):
    """As a process leaves it that is killed while it writes the configuration."""
    (tmp_path / "pre-layernorm-0").mkdir()
    (tmp_path / "pre-layernorm-0" / "config.yaml.writing").write_text("meth")
    assert study(tmp_path, *TWO) == 0
    assert trained == ["pre-layernorm-0", "post-layernorm-0"]


def test_a_run_that_cannot_go_on_leaves_the_others(tiny, tmp_path, trained, capsys):
    """Killed after its first checkpoint was due, and before it was written."""
    folder = tmp_path / "pre-layernorm-0"
    assert study(tmp_path, *TWO) == 0
    shutil.rmtree(folder / "checkpoints")
    (folder / "results.json").unlink()
    shutil.rmtree(tmp_path / "post-layernorm-0")
    trained.clear()
    assert study(tmp_path, *TWO) == 1
    assert trained == ["pre-layernorm-0", "post-layernorm-0"]
    said = capsys.readouterr().out
    assert "went past its first checkpoint and holds none" in said
    assert f"remove {folder} to start this run anew" in said
    assert "not trained: pre, LayerNorm, seed 0" in said
    entries = {entry["label"]: entry["status"] for entry in written(tmp_path)["runs"]}
    assert (entries["pre, LayerNorm"], entries["post, LayerNorm"]) == ("missing", "done")
    shutil.rmtree(folder)
    assert study(tmp_path, *TWO) == 0


def test_a_full_disk_is_no_failure_of_the_run(tiny, tmp_path, trained, monkeypatch, capsys):
    write = Checkpoints._finish

    def full(self, temporary, path, *rest):
        if path.name != "step-000002":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, temporary, path, *rest)

    monkeypatch.setattr(Checkpoints, "_finish", full)
    assert study(tmp_path, "--only", "pre, LayerNorm") == 1
    said = capsys.readouterr().out
    assert "No space left on device (" in said
    assert "goes on from step-000002; the same command goes on with the study" in said
    assert "not trained: pre, LayerNorm, seed 0" in said
    assert not (tmp_path / "pre-layernorm-0" / "failed.json").exists()
    monkeypatch.setattr(Checkpoints, "_finish", write)
    assert study(tmp_path, "--only", "pre, LayerNorm") == 0
    assert "continues after step 2" in capsys.readouterr().err


def test_a_run_without_results_is_a_mistake(tiny, tmp_path, capsys):
    words = ["--only", "pre, LayerNorm", "--steps", "1", "--eval.turns", "[]"]
    assert study(tmp_path, *words) == 2
    assert "pre-layernorm-0 ended without results" in capsys.readouterr().err


def test_a_signal_stops_the_study_after_the_step(tiny, tmp_path, trained, monkeypatch, capsys):
    step = trainer.train_step

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)

    monkeypatch.setattr(trainer, "train_step", interrupted)
    assert study(tmp_path) == 128 + signal.SIGTERM
    assert trained == ["pre-layernorm-0"]
    assert "stopped; the same command goes on: 4 runs are left" in capsys.readouterr().out
    monkeypatch.setattr(trainer, "train_step", step)
    assert study(tmp_path, "--only", "pre, LayerNorm") == 0
    assert "continues after step 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no study named 'nothing'; studies: depth-laws, "),
        (["methods", "--only", "adam"], "--only 'adam' fits no run of methods: sft; random-loop"),
        (["methods", "--stpes", "3"], "did you mean steps"),
        (["methods", "again"], "expected --field value, got 'again'"),
        (["methods", "--seeds", "0,x"], "expected seeds like 0,1,2, got '0,x'"),
        (["methods", "--scale", "huge"], "invalid choice: 'huge'"),
        (["--train.steps=3"], "a study's name must come before its fields"),
        (["norms", "--list", "--train.steps", "5"], "--list takes no fields, got --train.steps"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["study", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_list_says_what_studies_ask_and_their_runs(capsys):
    assert cli.main(["study"]) == 0
    everything = capsys.readouterr().out
    assert "norms: Norm placement and operator" in everything
    assert "    post-sandwich, SimpleNorm" in everything
    assert cli.main(["study", "--scale", "paper", "depth-laws", "--list"]) == 0
    one = capsys.readouterr().out
    assert "28 runs of addition-random-loop" in one
    assert "log-normal 2.62 0.6 to 40" in one
    assert "norms" not in one
