"""The allocator's setting: given where nobody has, and read by PyTorch in time."""

import subprocess
import sys

import pytest
import torch

from stars_fast import cli
from stars_fast.training.run import trainer
from stars_fast.training.scale import allocator
from stars_fast.training.scale.allocator import SETTINGS, grow_segments

GROWS = "expandable_segments:True"


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")


def environment():
    return {name: allocator.os.environ.get(name) for name in SETTINGS}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_users_setting_stays(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:128")
    before = environment()
    assert not grow_segments()
    assert environment() == before


def test_too_late_once_cuda_is_there_or_elsewhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not grow_segments()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(sys, "platform", "win32")
    assert not grow_segments()
    assert environment() == dict.fromkeys(SETTINGS)


def test_the_command_sets_it_before_the_run(monkeypatch):
    class Stop(Exception):
        pass

    def train(config, resume):
        assert environment()[SETTINGS[0]] == GROWS
        raise Stop

    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.setattr(allocator.os, "environ", dict(allocator.os.environ))
    with pytest.raises(Stop):
        cli.main(["train", "addition-quick"])


@pytest.mark.gpu
@pytest.mark.slow
def test_pytorch_reads_it():
    code = (
        "import torch; from stars_fast.training.scale.allocator import grow_segments as g; "
        "assert g(); torch.zeros(1, device='cuda'); "
        "print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
