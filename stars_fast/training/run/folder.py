"""Opening the folder of a run: what is checked before it is written, and its first files."""

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
from stars_fast.base.checkpoints import latest
from stars_fast.base.choices import CHOICES
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import naming, write_text
from stars_fast.base.run_folder import RunFolder
from stars_fast.training.config import RunConfig, load_config, save_config
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


def nothing_to_resume(run: RunFolder) -> str | None:
    """Why there is no run to continue here, with the nearest run beside it; None if there is
    one, or something that `reason_to_refuse` names."""
    try:
        if run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
            return None
    except OSError:
        return None
    what = "is empty" if run.path.exists() else "does not exist"
    places = dict.fromkeys((run.path.parent, Path("runs")))
    runs = [str(file.parent) for place in places for file in place.glob("*/config.yaml")]
    near = difflib.get_close_matches(str(run.path), runs, n=1, cutoff=0.0)
    hint = f"; the nearest run folder is {near[0]}" if near else ""
    return (
        f"--resume: {run.path} {what}, so there is no run to continue{hint}; to start a new "
        "run there leave --resume out"
    )


def reason_to_refuse(run: RunFolder, config: RunConfig, resume: bool) -> str | None:
    """Why `config` cannot be run here, or None if it can."""
    try:
        if not run.path.exists() or not any(run.path.iterdir()):
            return None
    except OSError as error:
        return f"{run.path} can't be a run folder: {error.strerror}"
    if not resume:
        return (
            f"{run.path} exists; continue that run with --resume, or choose another folder "
            f"with --out"
        )
    if not run.config.exists():
        return f"{run.path} holds no config.yaml, so there is no run to resume"
    if latest(run.checkpoints) is None and _went_past(run, config.train.save_every):
        return (
            f"{run.path} went past its first checkpoint and holds none, so its run can't "
            f"continue; start anew in another folder with --out"
        )
    before = tree.flat_mapping(tree.to_dict(load_config(str(run.config))))
    now = tree.flat_mapping(tree.to_dict(config))
    chosen = [name for name in CHOICES if before[name] != now[name]]
    changed = [
        f"{name} was {before[name]} and is {now[name]}"
        for name in chosen or now  # fields of another family or kind can't be compared
        if before[name] != now[name] and name not in MAY_CHANGE and not name.startswith("eval.")
    ]
    if changed:
        return f"cannot resume {run.path} as another run: " + "; ".join(changed)
    return None


def _went_past(run: RunFolder, step: int) -> bool:
    """Whether the metrics go beyond `step`, the first checkpoint's; 0 is the end of the run."""
    rows = read_metrics(run.metrics) if run.metrics.exists() else []
    return bool(rows) and (run.results.exists() or 0 < step < rows[-1]["step"])


def open_run(run: RunFolder, config: RunConfig, world_size: int) -> None:
    """Create the folder, write the configuration, and note the start and its environment."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't create {run.path}: {error.strerror}") from error
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
    try:
        save_config(config, run.config)
        with naming(run.environment), run.environment.open("a") as file:
            file.write(json.dumps(note) + "\n")
    except OSError as error:
        raise ConfigError(
            f"can't write the run folder {run.path}: {error.filename}: {error.strerror}"
        ) from error


def write_results(run: RunFolder, results: dict[str, Any]) -> None:
    """Write the accuracies at the end of the run as JSON."""
    write_text(run.results, json.dumps(results, indent=2) + "\n")
