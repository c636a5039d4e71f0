"""Where metrics go besides metrics.jsonl, when asked: TensorBoard, Weights & Biases, trackio.

None is imported, and nothing goes over the network, unless it is named. A user's own environment
variables (WANDB_MODE, WANDB_ENTITY, TRACKIO_DIR, ...) say where the last two write to.
"""

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import write_text
from stars_fast.base.optional import need

TRACKERS = ("tensorboard", "wandb", "trackio")


class Tracker(Protocol):
    """One place that metrics go to."""

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Take the finite numbers of a row; those of a nested mapping as "name/key"."""

    def flush(self) -> None:
        """Write out what was taken, as far as the library has a way to."""

    def close(self) -> None:
        """End the run there."""


def open_trackers(
    names: Sequence[str],
    *,
    folder: Path,
    run: str,
    project: str,
    config: dict[str, Any],
    step: int,
) -> list[Tracker]:
    """The trackers of `names`, each starting a run or going on with that of `folder`.

    TensorBoard is left out where it is not installed: compare the lengths to tell.

    Args:
        names: of TRACKERS.
        folder: of the run; what TensorBoard and W&B write lies in it.
        run: name of the run.
        project: that the run belongs to, for W&B and trackio.
        config: all settings of the run, shown beside it.
        step: last step of the checkpoint that the run goes on from, 0 for a new one. What
            TensorBoard holds of later steps is dropped; W&B and trackio keep it, W&B with the
            first value of each step.

    Raises:
        ValueError: a name that is not in TRACKERS.
        ConfigError: W&B or trackio is asked for and not installed, or one can't begin a run.
        OSError: a file can't be written.
    """
    if unknown := sorted(set(names) - set(TRACKERS)):
        raise ValueError(f"names: expected some of {TRACKERS}, got {unknown[0]!r}")
    opened: list[Tracker] = []
    for name in dict.fromkeys(names):
        with _beginning(name):
            if name == "wandb":
                opened.append(_WandB(folder, run, project, config))
            elif name == "trackio":
                opened.append(_Trackio(run, project, config, resumes=step > 0))
            elif (events := _TensorBoard.open(folder, step)) is not None:
                opened.append(events)
    return opened


@contextmanager
def _beginning(name: str) -> Iterator[None]:
    """Raise what a service has against a new run as ConfigError, such as a key that is missing."""
    try:
        yield
    except (ConfigError, OSError):
        raise
    except Exception as error:
        raise ConfigError(
            f"train.report_to: {name} can't begin a run: {type(error).__name__}: {error}"
        ) from error


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if W&B or trackio is asked for and not installed."""
    for name in names:
        if name != "tensorboard":
            need(name, "metrics")


def scalar_values(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a row, those of nested mappings under "name/key"; not its "step"."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", number) for key, number in scalar_values(value))
        elif name != "step" and isinstance(value, int | float) and math.isfinite(value):
            yield name, value


class _TensorBoard:
    """Event files in FOLDER/tensorboard."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    @classmethod
    def open(cls, folder: Path, step: int) -> "_TensorBoard | None":
        """None if TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return cls(SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1))

    def log(self, row: Mapping[str, Any], step: int) -> None:
        for name, value in scalar_values(row):
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases, whose id is kept in FOLDER/wandb_id so that it can go on."""

    def __init__(self, folder: Path, run: str, project: str, config: dict[str, Any]) -> None:
        wandb = need("wandb", "metrics")
        kept = folder / "wandb_id"
        if not kept.exists():
            write_text(kept, uuid.uuid4().hex)
        self._run = wandb.init(
            project=project,
            name=run,
            id=kept.read_text().strip(),
            dir=str(folder),
            config=config,
            resume="allow",
            allow_val_change=True,
        )

    def log(self, row: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(scalar_values(row)), step=step)

    def flush(self) -> None:
        """W&B writes by itself, in a process of its own."""

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of trackio; to go on with it is to go on with the newest of its name."""

    def __init__(self, run: str, project: str, config: dict[str, Any], resumes: bool) -> None:
        trackio = need("trackio", "metrics")
        resume = "allow" if resumes else "never"
        self._run = trackio.init(
            project=project, name=run, config=config, resume=resume, embed=False
        )

    def log(self, row: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(scalar_values(row)), step=step)

    def flush(self) -> None:
        """trackio writes by itself, in a thread of its own."""

    def close(self) -> None:
        self._run.finish()
