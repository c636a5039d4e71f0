import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import stars_fast
from stars_fast.cli import main
from stars_fast.models.families import looped_lm
from stars_fast.training.run import trainer

RECIPE = """\
description: tiny
method: stars
model: {d_model: 16, n_heads: 2, d_ff: 32}
data: {digits: 1, train_samples: 60, test_samples: 21}
depth: {mu: 1.0, high: 6}
train: {steps: 4, batch_size: 16, log_every: 1, threads: 1, report_to: []}
eval: {turns: [1, 4]}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "own.yaml").write_text("base: own.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(here):
    """A run in runs/tiny."""
    assert main(["train", "tiny.yaml", "--steps", "1", "--eval.turns", "1"]) == 0


def test_train_resume_and_eval(here, capsys):
    assert main(["train", "tiny.yaml", "--seed", "3"]) == 0
    assert main(["train", "tiny.yaml", "--seed", "3"]) == 2
    assert "runs/tiny exists" in capsys.readouterr().err
    assert main(["train", "runs/tiny", "--resume", "--steps", "6"]) == 0
    assert main(["train", "runs/tiny/config.yaml", "--out", "runs/again"]) == 0
    assert (
        main(["export", "runs/tiny", "exported"]) == 0
    )  # without a tokenizer, and none is asked for
    assert (here / "exported/config.json").exists()
    capsys.readouterr()

    assert main(["eval", "runs/tiny", "runs/again", "--turns", "1,2,8", "--limit", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["turns", "runs/tiny", "runs/again"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "8"]
    written = json.loads((here / "runs/tiny/evaluation.json").read_text())
    assert written["samples"] == {"runs/tiny": 20, "runs/again": 20}
    assert written["accuracy"]["runs/again"].keys() == {"1", "2", "8"}
    assert (here / "runs/tiny/evaluation.png").exists()
    assert "adaptive" not in written

    words = ["eval", "runs/tiny", "--turns", "1,8", "--limit", "20", "--tol", "0,0.5", "--out", "e"]
    assert main(words) == 0
    adaptive = json.loads((here / "e/evaluation.json").read_text())["adaptive"]["runs/tiny"]
    assert list(adaptive) == ["sequence", "token"]
    for points in adaptive.values():
        assert points["0.0"]["turns"] == 8 > points["0.5"]["turns"] >= 1
    assert (here / "e/compute.png").exists()
    assert main([*words, "--tol-per", "token"]) == 0
    assert list(json.loads((here / "e/evaluation.json").read_text())["adaptive"]["runs/tiny"]) == [
        "token"
    ]
    (here / "file").write_text("")
    capsys.readouterr()
    assert main(["eval", "runs/tiny", "--turns", "1", "--out", "file"]) == 2
    told = capsys.readouterr()
    assert "--out file can't be made" in told.err
    assert not told.out  # nothing was evaluated in vain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "usage: stars-fast train RECIPE"),
        (["train", "--steps", "3"], "usage: stars-fast train RECIPE"),
        (["train", "nothing"], "no recipe, YAML file or run folder named 'nothing'"),
        (["train", "tiny.yaml", "--stpes", "3"], "did you mean steps?"),
        (["train", "tiny.yaml", "--stpes"], "did you mean steps?"),
        (["train", "tiny.yaml", "--steps"], "--steps needs a value"),
        (["train", "tiny.yaml", "--resme"], "did you mean resume?"),
        (["trian", "tiny.yaml"], "did you mean train?"),
        (["eval", "tiny", "--turn", "1", "--limt", "3"], "did you mean --limit?"),
        (["train", "adition-quick"], "; did you mean addition-quick?"),
        (["recipes", "own.yaml"], "recipe own.yaml is its own base"),
        (["recipes", "own.yaml", "--all"], "recipe own.yaml is its own base"),
        (["recipes", "nothing"], "no recipe, YAML file or run folder named 'nothing'"),
        (["runs", "."], ".: expected a run folder, or a folder of some"),
        (["train", "tiny.yaml", "--batch_size", "15", "--accumulation", "2"], "multiple of"),
        (["train", "tiny.yaml", "--train_samples", "100000"], "train_samples"),
        (["train", "tiny.yaml", "--train_file", "none.jsonl"], "none.jsonl"),
        (["eval", "nowhere"], "nowhere is not a run folder"),
        (["eval", "tiny", "--turns", "1,x"], "expected a positive integer, got 'x'"),
        (["eval", "tiny", "--tol", "0.1,1"], "--tol: expected a value in [0, 1), got 0.1,1.0"),
        ([], "required"),
    ],
)
def test_mistakes_exit_with_2_and_one_message(here, capsys, words, message):
    try:
        code = main(words)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (here / "runs").exists()


def test_a_failed_run_exits_with_1(here, capsys, monkeypatch):
    real = looped_lm.token_loss
    monkeypatch.setattr(looped_lm, "token_loss", lambda *args: real(*args) * float("nan"))
    assert main(["train", "tiny.yaml", "--max_nonfinite", "2"]) == 1
    assert "was not finite" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_an_interrupted_run_exits_with_128_and_the_signal(here, monkeypatch, number, code):
    outcome = trainer.Outcome(1, here, number)
    monkeypatch.setattr(trainer, "train", lambda config, resume: outcome)
    assert main(["train", "tiny.yaml"]) == code


def test_help_names_every_field_with_default_and_meaning(capsys):
    assert main(["train", "--help-all"]) == 0
    said = capsys.readouterr().out
    assert "--penalty.weight float\n      lambda, once the start" in said
    assert "(default 0.1)" in said
    assert "--model.vocab_size int\n" in said
    assert "(default from the data)" in said
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("train", "eval", "recipes", "torchrun"))


def test_the_version_is_that_of_the_package_however_it_is_asked():
    module = subprocess.run(
        [sys.executable, "-m", "stars_fast", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert module.stdout == f"stars-fast {stars_fast.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", stars_fast.__version__)


COMPLETE = """
source completion.bash
COMP_WORDS=({words}) COMP_CWORD={at} COMPREPLY=()
{function} "" "" ""
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_recipes_fields_and_paths(here, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (here / "completion.bash").write_text(script)
    (function,) = re.findall(r"^complete .*-F (\S+) stars-fast$", script, re.MULTILINE)

    def completed(*words):
        code = COMPLETE.format(words=" ".join(words), at=len(words) - 1, function=function)
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert {"train", "eval", "recipes", "completion"} <= set(completed("stars-fast", "''"))
    assert completed("stars-fast", "train", "addition-quick-s") == [
        "addition-quick-sft",
        "addition-quick-stars",
    ]
    weights = completed("stars-fast", "train", "x", "--penalty.wei")
    assert weights == ["--penalty.weight", "--penalty.weighting"]
    assert completed("stars-fast", "train", "x", "--resume", "a") == ["auto"]
    assert completed("stars-fast", "eval", "tin") == ["tiny.yaml"]
    assert "--jacobian-at" in completed("stars-fast", "analyze", "x", "--")


def test_recipes_are_listed_with_a_line_each_without_loading_torch(capsys):
    code = (
        "import sys; from stars_fast.cli import main; main(['recipes']); "
        "assert not {'torch', 'matplotlib', 'scipy'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=1) for line in run.stdout.splitlines()]
    assert "addition-quick" in [line[0] for line in lines]
    assert all(len(line) == 2 for line in lines)


def test_recipes_on_a_narrow_terminal():
    from stars_fast.commands.recipes import listing

    narrow = listing(80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert " ".join(listing().split()) in " ".join(narrow.split())
    assert "stars-fast train addition-quick" in narrow


def test_a_recipe_says_which_settings_it_does_not_read(capsys):
    assert main(["recipes", "addition-quick"]) == 0
    head = " ".join(line for line in capsys.readouterr().out.splitlines() if line[0] == "#")
    assert "penalty.weight, " in head
    assert "optim.lr" not in head


@pytest.mark.slow
def test_what_reads_and_counts_loads_none_of_torchs_compilers():
    """They take as long as torch itself; checkpoints, CausalBias and `torch.compiler.disable`
    each bring them."""
    code = (
        "import sys; from contextlib import suppress; from stars_fast.cli import main\n"
        "with suppress(SystemExit):\n"
        "    main(['train', '--help']), main(['plan', 'addition-sft', '--gpus', '1xH200'])\n"
        "    main(['train', 'addition-quick', '--steps', 'x']), main(['eval', '--help'])\n"
        "heavy = ('torch._dynamo', 'torch.distributed.checkpoint', 'sympy', 'scipy', 'triton')\n"
        "sys.exit([name for name in heavy if name in sys.modules] or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not run.returncode, run.stderr
    assert run.stderr.splitlines() == ["stars-fast: train.steps: expected int, got 'x'"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such pipes")
@pytest.mark.parametrize(
    "words",
    ["recipes", "study", "--help", "train --help", "export --help",
     "eval runs/tiny --turns 1 --limit 5"],
)  # fmt: skip
def test_who_stops_reading_ends_it_quietly(here, trained, words):
    command = [sys.executable, "-m", "stars_fast.cli", *words.split()]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # else argparse passes over the broken pipe
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=buffered, **pipes) as process:
        process.stdout.close()  # before it writes anything
        said = process.stderr.read().decode()
        code = process.wait()
    assert code == 141
    assert "Error" not in said
    assert "Exception" not in said


def test_another_broken_pipe_is_no_quiet_end(monkeypatch):
    from stars_fast.commands import recipes

    def breaks(words):
        raise BrokenPipeError("a worker has died")

    monkeypatch.setattr(recipes, "main", breaks)
    with pytest.raises(BrokenPipeError, match="a worker has died"):
        main(["recipes"])
