"""A study small enough for a test, as the command sees it."""

import pytest
from studies_tiny import TINY

from stars_fast.training.run.trainer import Trainer
from studies import __main__ as command
from studies.definition import parse_study


@pytest.fixture(autouse=True)
def _no_figures_of_runs(monkeypatch):
    """They take longer than a tiny run."""
    monkeypatch.setattr(Trainer, "_draw", lambda *_: None)


@pytest.fixture
def tiny(monkeypatch):
    """The study `tiny`, for the command too."""
    study = parse_study("tiny", TINY)
    monkeypatch.setattr(command, "read_study", lambda name: study)
    return study
