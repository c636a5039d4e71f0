"""The choice of a design for the backward of the attention."""

import pytest
import torch

pytest.importorskip("triton")

from stars_fast.ops.triton import attention_backward
from stars_fast.ops.triton.attention_backward import CHOSEN, DESIGNS, OVERRIDE, Design, design

Q = torch.zeros(2, 1, 1, 3, 16)


@pytest.fixture
def other(monkeypatch):
    """A design that adds in any order and takes heads up to 16 wide."""
    taken = Design(DESIGNS["split"].run, False, lambda q: q.shape[-1] <= 16)
    monkeypatch.setitem(DESIGNS, "other", taken)
    monkeypatch.setattr(attention_backward, "architecture", lambda device: "sm_00")
    torch.use_deterministic_algorithms(False)


def test_an_architecture_has_its_design(other, monkeypatch):
    assert design(Q) == "split"
    monkeypatch.setitem(CHOSEN, "sm_00", "other")
    assert design(Q) == "other"
    assert design(torch.zeros(2, 1, 1, 3, 17)) == "split"


def test_the_environment_names_a_design(other, monkeypatch):
    monkeypatch.setenv(OVERRIDE, "other")
    assert design(Q) == "other"
    monkeypatch.setitem(CHOSEN, "sm_00", "other")
    monkeypatch.setenv(OVERRIDE, "split")
    assert design(Q) == "split"
    monkeypatch.setenv(OVERRIDE, "typo")
    with pytest.raises(ValueError, match=f"{OVERRIDE}: expected one of .*'split'.*, got 'typo'"):
        design(Q)


def test_deterministic_algorithms_take_a_deterministic_design(other, monkeypatch):
    monkeypatch.setenv(OVERRIDE, "other")
    monkeypatch.setitem(CHOSEN, "sm_00", "other")
    torch.use_deterministic_algorithms(True)
    assert design(Q) == "split"


def test_what_is_chosen_is_there():
    assert set(CHOSEN.values()) <= set(DESIGNS)
    assert DESIGNS["split"].deterministic
