"""`stars-fast plan` as a user meets it."""

import json
import subprocess
import sys

import pytest

from stars_fast import cli
from stars_fast.training.plan.cards import cards


def said(capsys, *words, code=0):
    assert cli.main(["plan", *words]) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


def test_the_plan_for_people(capsys):
    text = said(capsys, "ouro-numina-fast", "--gpus", "4xA800-80GB")
    first, *lines = text.splitlines()
    assert "predicted" in first
    heads = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert heads == ["model", "step", "time", "limit", "memory", "graphs", "run", "stars,"]
    assert "SFT, as we run it" in text
    assert "stars, the published way" in text


def test_the_plan_for_programs(capsys):
    words = ["ouro-numina-fast", "--json", "--gpus=8xH100", "--train.steps", "100"]
    found = json.loads(said(capsys, *words))
    assert found["gpus"] == "8xH100"
    assert found["steps"] == 100
    assert found["ours"]["hours"] == pytest.approx(found["ours"]["seconds"] * 100 / 3600)
    shorter = json.loads(said(capsys, *words, "--document", "100"))
    assert shorter["documents_a_row"] > found["documents_a_row"]


def test_what_does_not_fit_says_so(capsys):
    text = said(capsys, "ouro-numina-fast", "--gpus", "4xRTX-4090")
    assert "limit   memory: it does not fit" in text
    assert "does not fit; would: --parallel.kind fsdp" in text


def test_the_table(capsys):
    text = said(capsys, "ouro-numina-fast", "--table")
    assert text.splitlines()[0].startswith("| tokens | turns | run | A800-80GB |")
    assert len(json.loads(said(capsys, "ouro-numina-fast", "--table", "--json"))) == 36


@pytest.mark.parametrize("words", [[], ["--help"], ["ouro-tiny", "-h"]])
def test_help_names_the_cards(capsys, words):
    text = said(capsys, *words)
    assert all(name in text for name in cards())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ouro-numina"], "--gpus: expected a number and one of A100-40GB"),
        (["ouro-numina", "--gpus"], "--gpus needs a value"),
        (["ouro-numina", "--gpus", "3xH200"], "train: batch_size: expected a multiple"),
        (["ouro-numina", "--gpus", "A100"], "A100-40GB, A100-80GB, as in 4xH200, got 'A100'"),
        (["ouro-numina", "--gpus", "H200", "--document", "0"], "--document: expected a positive"),
        (["--gpus", "H200"], "usage: stars-fast plan RECIPE"),
        (["ouro-numina", "--gpus", "H200", "--no.field", "1"], "no.field"),
        (["nothing", "--gpus", "H200"], "nothing"),
    ],
)
def test_mistakes(capsys, words, message):
    assert message in said(capsys, *words, code=2)


@pytest.mark.slow
def test_nothing_is_made_or_loaded():
    """No model, no CUDA, none of the libraries that take seconds."""
    code = (
        "import sys, torch; from stars_fast import cli; from stars_fast.commands import plan; "
        "torch.nn.Linear.__init__ = torch.nn.Embedding.__init__ = None; "
        "assert cli.main(['plan', 'ouro-numina-fast', '--gpus', '4xH200']) == 0; "
        "assert not {'transformers', 'datasets', 'peft'} & sys.modules.keys(); "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
