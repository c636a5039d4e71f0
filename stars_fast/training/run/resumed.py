"""Data and model of a run that goes on, held against those of its checkpoint wherever they lie."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.models.families import section_of
from stars_fast.training.run.task import Task
from stars_fast.training.scale.distributed import World


class Sources(NamedTuple):
    """Fingerprints of what a run is made from, which its checkpoints keep.

    data: of the training data.
    held_out: of those it is judged on; None without.
    base: of the weights that adapters are trained on; None without adapters.
    """

    data: int
    held_out: int | None
    base: str | None

    @classmethod
    def of(cls, task: Task, world: World) -> "Sources":
        """Those of a task.

        Raises:
            ConfigError: on all processes, if their training data differ.
        """
        data, held_out = task.data.source.fingerprint(), task.data.held_out
        if world.largest(data) != -world.largest(-data):
            raise ConfigError(
                "the training data differ between processes: their machines have other files or "
                "another version of data.source"
            )
        return cls(data, None if held_out is None else held_out.fingerprint(), task.base)

    def check(self, kept: Mapping[str, Any], checkpoint: Path) -> None:
        """Hold them against the state of a checkpoint.

        Raises:
            ConfigError: they are others.
        """
        if kept["data"] != self.data:
            raise ConfigError(
                f"the training data are not those that {checkpoint} was trained on; give the run "
                "its data back, or start another one from an exported model"
            )
        if kept.get("held_out", self.held_out) != self.held_out:
            raise ConfigError(
                f"the held-out data are not those that the run of {checkpoint} was judged on; give "
                "it its data back"
            )
        if kept.get("base") != self.base:
            raise ConfigError(
                f"the weights that the adapters of {checkpoint} were trained on are not those of "
                "model.path any more; give the run its model back"
            )


def check_model(task: Task, folder: RunFolder) -> None:
    """Refuse another model than the run's at a `model.path` that has changed. Its weights are
    those of the checkpoint, but for what adapters are trained on, which `Sources` look at.

    Raises:
        ConfigError: it is one.
    """
    unchanged = not folder.config.exists() or task.config.model == section_of(folder)
    if unchanged or not (folder.model / "config.json").exists():
        return
    differing = task.family.differing(task.loop.model, folder.model)
    if differing:
        raise ConfigError(
            f"model.path: expected the model of the run in {folder.path}, got one whose "
            f"configuration differs in {', '.join(differing)}"
        )


def goes_on_otherwise(processes: tuple[int, int], accumulation: tuple[int, int]) -> list[str]:
    """Lines on what is not bit for bit as it was: each is the number of the checkpoint, and of the
    run that goes on."""
    notes = []
    before, now = processes
    if before != now:
        notes.append(
            f"the checkpoint is of {before} processes and {now} go on: the same samples in the "
            "same order, but not bit for bit"
        )
    before, now = accumulation
    if before != now:
        notes.append(
            f"the checkpoint is of {before} micro-batch{'es' * (before > 1)} a step on each "
            f"process and {now} go on: the same samples in the same order, but other draws of "
            "depths, of the penalty's samples and of dropout"
        )
    return notes
