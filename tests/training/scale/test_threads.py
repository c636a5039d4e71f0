"""How many CPU threads a run takes, and what it says of them."""

import os

import pytest
import torch

from stars_fast.training.scale import threads
from stars_fast.training.scale.threads import SMALL, cpu_quota, settle_threads

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """A machine of 8 cores on which PyTorch has 8 threads; what is set lands in `threads`."""
    state = {"threads": 8}
    monkeypatch.setattr(torch, "set_num_threads", lambda n: state.update(threads=n))
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 1.0, 1.0))
    return state


def test_what_is_asked_for_is_taken(machine):
    assert settle_threads(5, 10, CPU) == []
    assert machine["threads"] == 5


def test_a_small_model_takes_one(machine):
    assert settle_threads(None, SMALL - 1, CPU) == []
    assert machine["threads"] == 1


@pytest.mark.parametrize(("weights", "device"), [(SMALL, "cpu"), (None, "cpu"), (10, "cuda")])
def test_others_keep_those_of_torch(machine, weights, device):
    assert settle_threads(None, weights, torch.device(device)) == []
    assert machine["threads"] == 8


def test_no_more_than_a_container_lends(machine, monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    settle_threads(None, None, CPU)
    assert machine["threads"] == 2


def test_a_busy_machine_is_a_warning(machine, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (20.0, 1.0, 1.0))
    (line,) = settle_threads(None, SMALL, CPU)
    assert "20.0 processes want the 8 cores" in line
    assert "--train.threads 1" in line
    assert settle_threads(None, 10, CPU) == []


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), (None, None)]
)
def test_the_quota_of_a_control_group(tmp_path, text, cores):
    if text:
        (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == cores
