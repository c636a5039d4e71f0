"""Huginn and looped decoders on two processes, under DDP and FSDP2."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import fresh


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["huginn", "looped"])
def test_two_processes_have_the_loss_and_the_gradients_of_one(kind):
    script = Path(__file__).parent / "scripts" / "looped_parallel.py"
    said = fresh.two_ranks(script, kind, TRITON_INTERPRET="0")
    assert said == ["equal\n", "equal\n"]
