"""The folder of a run: where its configuration, metrics, checkpoints and figures lie."""

import difflib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import stars_fast
from stars_fast.base import tree
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import write_text
from stars_fast.training.config import RunConfig, load_config, save_config
from stars_fast.training.run.checkpoint import checkpoints, latest
from stars_fast.training.run.metrics import read_metrics

MAY_CHANGE = {
    "name",
    "description",
    "out",
    "train.steps",
    "train.log_every",
    "train.save_every",
    "train.keep",
    "train.max_nonfinite",
    "train.reference_turns",
    "train.device",
    "train.threads",
    "train.epochs",
    "train.report_to",
    "train.project",
    "data.cache",
    "data.workers",
    "parallel.kind",
    "parallel.shard",
    "parallel.reshard",
    "parallel.offload",
    "memory.recompute",
    "memory.budget",
}

"""Fields that a resumed run may set anew, beside those of eval; any other would make it another
run."""


class RunFolder:
    """The paths of a run, and what is checked before it is written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.results = self.path / "results.json"
        self.checkpoints = self.path / "checkpoints"

    def nothing_to_resume(self) -> str | None:
        """Why there is no run to continue here, with the nearest run beside it; None if there is
        one, or something that `refusal` names."""
        try:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                return None
        except OSError:
            return None
        what = "is empty" if self.path.exists() else "does not exist"
        places = dict.fromkeys((self.path.parent, Path("runs")))
        runs = [str(file.parent) for place in places for file in place.glob("*/config.yaml")]
        near = difflib.get_close_matches(str(self.path), runs, n=1, cutoff=0.0)
        hint = f"; the nearest run folder is {near[0]}" if near else ""
        return (
            f"--resume: {self.path} {what}, so there is no run to continue{hint}; to start a new "
            "run there leave --resume out"
        )

    def refusal(self, config: RunConfig, resume: bool) -> str | None:
        """Why `config` cannot be run here, or None if it can."""
        try:
            if not self.path.exists() or not any(self.path.iterdir()):
                return None
        except OSError as error:
            return f"{self.path} can't be a run folder: {error.strerror}"
        if not resume:
            return (
                f"{self.path} exists; continue that run with --resume, or choose another folder "
                f"with --out"
            )
        if not self.config.exists():
            return f"{self.path} holds no config.yaml, so there is no run to resume"
        if latest(self.checkpoints) is None and self._went_past(config.train.save_every):
            return (
                f"{self.path} went past its first checkpoint and holds none, so its run can't "
                f"continue; start anew in another folder with --out"
            )
        if (task := load_config(str(self.config)).task) != config.task:
            return f"cannot resume {self.path} as another run: task was {task} and is {config.task}"
        before = tree.flatten(tree.to_dict(load_config(str(self.config))))
        now = tree.flatten(tree.to_dict(config))
        changed = [
            f"{name} was {before[name]} and is {now[name]}"
            for name in now
            if before[name] != now[name] and name not in MAY_CHANGE and not name.startswith("eval.")
        ]
        if changed:
            return f"cannot resume {self.path} as another run: " + "; ".join(changed)
        return None

    def _went_past(self, step: int) -> bool:
        """Whether the metrics go beyond `step`, the first checkpoint's; 0 is the end of the run."""
        rows = read_metrics(self.metrics) if self.metrics.exists() else []
        return bool(rows) and (self.results.exists() or 0 < step < rows[-1]["step"])

    def open(self, config: RunConfig, world_size: int) -> None:
        """Create the folder, write the configuration, and note the start and its environment."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"can't create {self.path}: {error.strerror}") from error
        save_config(config, self.config)
        note = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "stars_fast": stars_fast.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "processes": world_size,
        }
        with self.environment.open("a") as file:
            file.write(json.dumps(note) + "\n")

    def checkpoint(self, step: int | None = None) -> Path:
        """The newest complete checkpoint, or that of `step`; ConfigError if it is not there."""
        if step is None:
            found = latest(self.checkpoints)
            if found is None:
                raise ConfigError(f"{self.path} has no checkpoint yet")
            return found
        known = checkpoints(self.checkpoints)
        if step not in known:
            raise ConfigError(
                f"{self.path} has no checkpoint of step {step}; it has {sorted(known)}"
            )
        return known[step]

    def write_results(self, results: dict[str, Any]) -> None:
        """Write the accuracies at the end of the run as JSON."""
        write_text(self.results, json.dumps(results, indent=2) + "\n")
