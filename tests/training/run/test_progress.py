"""The bar on terminals of several widths, and the outlook of a run."""

import os
import sys
from contextlib import suppress

import pytest

from stars_fast.training.config import load_config
from stars_fast.training.plan.cards import parse_gpus
from stars_fast.training.run.outlook import foreseen
from stars_fast.training.run.progress import Progress

ROW = {
    "step": 1440, "loss": 0.1234, "penalty": 0.4567, "lambda": 0.2, "depth": 6.2,
    "grad_norm": 1.234, "tokens_per_second": 12345.0, "mfu": None, "memory_gib": 0.7, "skipped": 0,
}  # fmt: skip


def written(terminal):
    """All that was written to the other end, which is closed."""
    data = b""
    with open(terminal, "rb", buffering=0) as end, suppress(OSError):  # that is the end on Linux
        while more := end.read(10_000):
            data += more
    return data.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="no terminals of this kind")
@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_the_remaining_time_is_on_every_terminal(monkeypatch, columns):
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    near, far = os.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, bytes([24, 0, columns, 0, 0, 0, 0, 0]))
    with os.fdopen(far, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = Progress(load_config("addition-quick-stars"), 1438, 0.3, True)
        for step in (1438, 1439):
            progress.step(step, 6.0)
        progress.show(ROW)
        progress.bar.refresh()
        progress.close()
    text = written(near)
    lines = [line.strip("\x1b[A") for line in text.replace("\n", "\r").split("\r")]
    (last, *_) = [line for line in reversed(lines) if "loss" in line]
    assert len(last) <= columns
    assert " eta " in last
    assert "loss 0.1234" in last
    assert last.index("eta") < last.index("loss")
    assert "] ," not in text


@pytest.mark.parametrize("recipe", ["addition", "ouro-numina-fast", "ouro-numina-lora"])
def test_a_run_on_a_known_card_is_foreseen(recipe):
    (line,) = foreseen(load_config(recipe), parse_gpus("H200"), 600)
    assert line.startswith("foreseen on 1xH200, by rates measured on one H200: ")
    assert " s a step" in line
    assert "GiB of" in line


def test_what_does_not_fit_is_a_warning():
    _, warning = foreseen(load_config("ouro-numina"), parse_gpus("RTX-4090"), 600)
    assert "does not fit; would: " in warning
