"""Huginn and looped decoders on two processes, under DDP and FSDP2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["huginn", "looped"])
def test_two_processes_have_the_loss_and_the_gradients_of_one(kind):
    script = Path(__file__).parent / "scripts" / "looped_parallel.py"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(script), kind,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # where pytest finds the tests' modules
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=240
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "equal" in run.stdout
