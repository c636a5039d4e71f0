"""Opening the folder of a run: what is checked before it is written, and its first files."""

import difflib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import stars_fast
from stars_fast.base import claim, tree
from stars_fast.base.checkpoints import latest
from stars_fast.base.choices import CHOICES
from stars_fast.base.claim import Claim
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import cant_write, write_text
from stars_fast.base.run_folder import RunFolder
from stars_fast.training.config import RunConfig, load_config, save_config
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.scale.distributed import World

MAY_CHANGE = {
    "name",
    "description",
    "out",
    "train.steps",
    "train.log_every",
    "train.save_every",
    "train.keep",
    "train.micro_batch_size",
    "train.accumulation",
    "train.max_nonfinite",
    "train.reference_turns",
    "train.device",
    "train.threads",
    "train.epochs",
    "train.report_to",
    "train.project",
    "model.path",
    "data.source",
    "data.subset",
    "data.split",
    "data.train_file",
    "data.test_file",
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
run. The data and the model are held against those of the run, wherever they lie."""


def nothing_to_resume(run: RunFolder) -> str | None:
    """Why there is no run to continue here, with the nearest run beside it; None if there is
    one, or something that `reason_to_refuse` names."""
    try:
        if run.path.exists() and (not run.path.is_dir() or _entries(run)):
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
        if not run.path.exists():
            return _in_the_way(run.path)
        if not _entries(run):
            return None
        # Of a run that died before it took a step; not a recipe that lies there
        begun = _begun(run) or not (run.path / claim.FOLDER).exists()
    except OSError as error:
        return f"{run.path} can't be a run folder: {error.strerror}"
    if not resume and not begun:
        return None
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


def _in_the_way(path: Path) -> str | None:
    """Why a folder that is not there can't be made, as far as a look can tell."""
    above = next(each for each in path.absolute().parents if each.exists())
    if not above.is_dir():
        return f"{path} can't be a run folder: {above} is a file"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"{path} can't be a run folder: {above} can't be written to"
    return None


def _went_past(run: RunFolder, step: int) -> bool:
    """Whether the metrics go beyond `step`, the first checkpoint's (0 is the end of the run), and
    their folder is not there: where it is, empty, the saves had no room on the disk."""
    if not run.results.exists() and run.checkpoints.is_dir():
        return False
    rows = read_metrics(run.metrics) if run.metrics.exists() else []
    return bool(rows) and (run.results.exists() or 0 < step < rows[-1]["step"])


def _entries(run: RunFolder) -> set[str]:
    """Names in the folder; who owns it, and what a kill cut short of its configuration, aside."""
    aside = {claim.FOLDER, f"{run.config.name}.writing"}
    return {path.name for path in run.path.iterdir()} - aside


def _begun(run: RunFolder) -> bool:
    """Whether more than a configuration is in the folder."""
    return bool(_entries(run) - {run.config.name})


@contextmanager
def owned(run: RunFolder, config: RunConfig, world: World, resume: bool) -> Iterator[Claim | None]:
    """Have the folder to this run alone: the claim of the first process, None on the others.

    From here on it holds a configuration, so that `--resume` works whenever the run dies. What was
    made here goes again if the run fails before its first start is noted.

    Raises:
        ConfigError: on all processes, if another run owns the folder, `config` can't be run here,
            or one of them sees another folder.
    """
    held, fresh = world.together(
        lambda: _claim(run, config, resume) if world.first else (None, False)
    )
    try:
        if world.size > 1:
            token = world.from_first(held and held.token)
            world.together(lambda: _check_shared(run, token))
        yield held
    except Exception:
        with suppress(OSError):
            if held is not None and fresh and not _begun(run):
                run.config.unlink()
                held.withdraw()
        raise
    finally:
        if held is not None:
            held.release()


def _check_shared(run: RunFolder, token: str) -> None:
    """Raise ConfigError unless the folder here is the one in which the first process has the claim
    of this token."""
    if not claim.sees_claim(run.path, token):
        raise ConfigError(
            "out: expected a folder in one file system that all machines see, got "
            f"{run.path.absolute()}, which on {socket.gethostname()} is not the first process's"
        )


def _claim(run: RunFolder, config: RunConfig, resume: bool) -> tuple[Claim, bool]:
    """The claim, and whether the folder held no configuration before."""
    held = Claim(run.path, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        # Again: another run may have come and gone since it was asked
        refusal = reason_to_refuse(run, config, resume)
        if refusal is not None:
            raise ConfigError(refusal)
        fresh = not run.config.exists()
        if fresh or not resume:
            save_config(config, run.config)
    except OSError as error:
        held.withdraw()
        raise ConfigError(
            f"{run.path} can't be written to: {cant_write(run.path, error)}"
        ) from error
    except BaseException:
        held.withdraw()
        raise
    return held, fresh


def open_run(run: RunFolder, config: RunConfig, world_size: int) -> None:
    """Create the folder, write the configuration, and note the start and its environment."""
    run.path.mkdir(parents=True, exist_ok=True)
    save_config(config, run.config)
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
    with run.environment.open("a") as file:
        file.write(json.dumps(note) + "\n")


def write_results(run: RunFolder, results: dict[str, Any]) -> None:
    """Write the accuracies at the end of the run as JSON."""
    write_text(run.results, json.dumps(results, indent=2) + "\n")
