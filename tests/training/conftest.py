"""A run small enough for a test, and a way to start one as one or more processes."""

import pytest
from ranks import run_ranks

from stars_fast.base.tree import merge
from stars_fast.training.config import config_from
from stars_fast.training.run.trainer import Trainer

TINY = {
    "method": "stars",
    "model": {"d_model": 16, "n_heads": 2, "d_ff": 32},
    "data": {"digits": 1, "train_samples": 60, "test_samples": 21},
    "depth": {"law": "lognormal", "mu": 1.0, "sigma": 0.4, "high": 6},
    "train": {"steps": 6, "batch_size": 16, "log_every": 1, "threads": 1, "report_to": []},
    "eval": {"turns": []},
}
FIXED = {"law": "fixed", "value": 3}


@pytest.fixture(autouse=True)
def _no_figures(request, monkeypatch):
    """Figures take longer than a tiny run; tests that use `figures` draw them."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr(Trainer, "_draw", lambda *_: None)


@pytest.fixture
def figures():
    """Asks for the figures at the end of runs."""


@pytest.fixture(scope="session")
def tiny_in():
    """tiny_in(folder, method=..., **sections) -> Config of a run of a few steps there."""

    def make(folder, **changes):
        mapping = merge(TINY, {"out": str(folder), "name": folder.name})
        if changes.get("method") in ("sft", "jsrr"):
            mapping = merge(mapping, {"depth": FIXED})
        return config_from(merge(mapping, changes))

    return make


@pytest.fixture
def tiny(tiny_in, tmp_path):
    """tiny(**changes) -> Config of a run of a few steps in tmp_path/run."""
    return lambda **changes: tiny_in(tmp_path / "run", **changes)


@pytest.fixture(scope="session")
def launch():
    """launch(command, processes) -> exit codes; `command` runs once a rank, as torchrun would."""
    return run_ranks
