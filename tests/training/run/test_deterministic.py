"""Runs that repeat bit for bit on a GPU, and what that sets and puts back."""

import os

import pytest
import torch

from stars_fast.training.config import load_config
from stars_fast.training.run import trainer
from stars_fast.training.run.deterministic import WORKSPACE, deterministic


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get(WORKSPACE),
    )


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    # torch's own testing module, which other tests import, forbids to set cuDNN's flags.
    with torch.backends.__allow_nonbracketed_mutation():
        yield


def test_what_is_set_is_put_back():
    before, inside = settings(), []

    def fail():
        with deterministic(True):
            inside.append(settings())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert inside == [(True, False, True, False, False, ":4096:8")]
    assert settings() == before
    with deterministic(False):
        assert settings() == before


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic(True):
            assert os.environ[WORKSPACE] == ":16:8"
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ[WORKSPACE] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_follows_its_settings(tmp_path, monkeypatch, wanted):
    seen = []

    class Stop(Exception):
        pass

    def task(config, world):
        seen.append(settings()[0])
        raise Stop

    monkeypatch.setattr(trainer, "Task", task)
    words = ["--out", str(tmp_path / "run"), "--train.deterministic", str(wanted).lower()]
    with pytest.raises(Stop):
        trainer.train(load_config("addition-quick", words))
    assert seen == [wanted]


@pytest.mark.gpu
@pytest.mark.slow
def test_two_runs_on_a_gpu_are_the_same(tmp_path):
    from stars_fast.models.saved import find_model, load_model

    pytest.importorskip("transformers")
    found = []
    for name in ("one", "two"):
        words = ["--out", str(tmp_path / name), "--steps", "3", "--train.deterministic", "true"]
        trainer.train(load_config("ouro-tiny", [*words, "--precision", "mixed"]))
        found.append(load_model(find_model(str(tmp_path / name))).state_dict())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
