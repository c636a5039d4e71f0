"""What a user's terminal shows besides the command's own lines: nothing of other libraries."""

import logging
import subprocess
import sys

import pytest

from stars_fast.base.quiet import quiet_import


def stderr_of(*words):
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    ["recipes", "train --help", "eval --help", "analyze --help", "study --help", "export --help"],
)
def test_commands_print_nothing_of_others(words):
    pytest.importorskip("yaml")
    assert stderr_of("-m", "stars_fast.cli", *words.split()) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["stars_fast.models.ouro", "stars_fast.training.run.task", "stars_fast.evaluation.lm_model"],
)
def test_imports_print_nothing_of_others(module):
    pytest.importorskip("transformers")
    pytest.importorskip("lm_eval")
    assert stderr_of("-c", f"import {module}") == ""


@pytest.mark.slow
def test_stochastic_rounding_prints_nothing_of_torchao():
    pytest.importorskip("torchao")
    code = "from stars_fast.base.optional import need; need('torchao.optim', 'tests')"
    assert stderr_of("-c", code) == ""


def test_only_these_loggers_are_held_back_and_only_while_importing(caplog):
    torchao, others = logging.getLogger("torchao"), logging.getLogger("torchao_like")
    with quiet_import():
        torchao.warning("held back")
        torchao.error("an error")
        others.warning("of others")
    torchao.warning("afterwards")
    assert [record.message for record in caplog.records] == ["an error", "of others", "afterwards"]
    with pytest.raises(KeyError), quiet_import():
        raise KeyError
    assert not torchao.filters
