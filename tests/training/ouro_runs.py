"""Small runs of the Ouro trainer, for tests."""

from pathlib import Path

from stars_fast.base.tree import merge
from stars_fast.training.config import config_from
from stars_fast.training.run.metrics import read_metrics

TINY = {
    "task": "ouro",
    "method": "stars",
    "precision": "float32",
    "model": {"path": "tiny", "width": 32, "layers": 2},
    "data": {"source": "tiny-chat", "samples": 80, "max_length": 160, "system": None, "workers": 1},
    "depth": {"law": "lognormal", "mu": 1.0, "sigma": 0.4, "high": 5},
    "optim": {"lr": 3e-3, "weight_decay": 0.0},
    "train": {
        "steps": 6, "batch_size": 4, "log_every": 1, "save_every": 0, "threads": 1, "report_to": [],
    },
    "eval": {"turns": []},
}  # fmt: skip
FIXED = {"law": "fixed", "value": 3}


def ouro_run(folder, cache, **changes):
    """The configuration of a run of a few steps in `folder`."""
    mapping = merge(TINY, {"out": str(folder), "name": folder.name, "data": {"cache": str(cache)}})
    if changes.get("method") in ("sft", "jsrr"):
        mapping = merge(mapping, {"depth": FIXED})
    return config_from(merge(mapping, changes))


def rows_of(folder):
    """The metrics of a run but its speed and memory."""
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    for row in rows:
        for name in ("tokens_per_second", "mfu", "memory_gib"):
            row.pop(name)
    return rows
