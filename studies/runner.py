"""Train what is left of a study, run by run, and judge what is done.

A run is done if its results are written or there is a record of it, failed if its folder says why,
and otherwise trained, or continued from its newest checkpoint.
"""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stars_fast.base import tree
from stars_fast.base.checkpoints import latest
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import write_text
from stars_fast.base.run_folder import RunFolder
from stars_fast.training.config import load_config, save_config
from stars_fast.training.run.checkpoint import SaveError
from stars_fast.training.run.folder import MAY_CHANGE
from stars_fast.training.run.progress import duration
from stars_fast.training.run.trainer import TrainingFailure, train
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.cost import expected_costs
from studies.definition import StudyRun
from studies.judging import judge_run
from studies.records import CHECKPOINTS, Records

MAY_DIFFER = frozenset(
    (MAY_CHANGE | {"eval.limit"})  # of the run's own evaluation, which no study reads
    - {"train.steps", "train.epochs", "train.max_nonfinite"}
    - {"train.micro_batch_size", "train.accumulation", "model.path"}
    - {"data.source", "data.subset", "data.split", "data.train_file", "data.test_file"}
)
"""Fields that a run of a study may have otherwise than its definition: those that do not change
what comes out."""


def may_differ(run: StudyRun) -> frozenset[str]:
    """Those of a run: which checkpoints there are matters where several are judged."""
    return MAY_DIFFER - (CHECKPOINTS if run.judged.checkpoints > 1 else frozenset())


def check_folders(runs: Sequence[StudyRun]) -> None:
    """Raise ConfigError if the folder of a run holds another one, with the fields that differ."""
    for run in runs:
        folder = RunFolder(run.folder)
        if not folder.config.exists():
            continue
        before = tree.flat_mapping(tree.to_dict(load_config(str(folder.config))))
        now = tree.flat_mapping(tree.to_dict(run.config))
        changed = [
            f"{name} was {before.get(name)} and is {now.get(name)}"
            for name in sorted({*before, *now} - may_differ(run))
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise ConfigError(
                f"{run.folder} holds another run than the study's now, {run.label}, seed "
                f"{run.seed}: {'; '.join(changed)}. Choose another folder with --out, or remove "
                "that one"
            )


def train_runs(runs: Sequence[StudyRun], world: World, records: Records) -> int:
    """Train those of `runs` that are not done; the signal that stopped one, 0 if none did.

    Every process of `world` calls it. A run that cannot recover leaves a note in its folder, and
    the next one begins; so it does after one that cannot start, or whose disk is full, which leave
    no note.
    """
    clock = Remaining([run for run in runs if status(run, records) == "missing"])
    for number, run in enumerate(runs, start=1):
        where = f"[{number}/{len(runs)}] {run.label}, seed {run.seed}"
        known = world.from_first(status(run, records))
        if known != "missing":
            _say(world, f"{where}: {known}")
            if known == "done":
                world.together(partial(_record, run, world, records))
            continue
        _say(world, where + clock.begin(run))
        try:
            world.together(partial(_begin, run, world))
            outcome = train(run.config, resume=True)
        except ConfigError as error:
            _say(world, f"{where}: not trained: {error}{_advice(run)}")
            continue
        except TrainingFailure as error:
            if isinstance(error.__cause__, SaveError):
                _say(world, f"{where}: stopped: {error}; the same command goes on with the study")
                continue
            _say(world, f"{where}: failed: {error}")
            if world.first:
                run.folder.mkdir(parents=True, exist_ok=True)
                write_text(note_of(run), json.dumps({"failed": str(error)}) + "\n")
            continue
        if outcome.signal:
            return outcome.signal
        # Now, so that the machine and the commit that are noted are those that trained it.
        world.together(partial(_judge_new, run, world, records))
        clock.end(run)
    return 0


class Remaining:
    """The time that runs that are missing still take, by the expected turns of each and the seconds
    that the turns of those that were trained took; of runs that begin here."""

    def __init__(self, runs: Sequence[StudyRun]) -> None:
        self.costs = {run.folder: _cost(run) for run in runs}
        self.seconds = self.done = 0.0
        self.began = time.perf_counter()

    def begin(self, run: StudyRun) -> str:
        """Words on what is left, empty before a run has ended; the clock of `run` starts."""
        self.began = time.perf_counter()
        if not self.done:
            return ""
        left = sum(self.costs.values()) * self.seconds / self.done
        return (
            f"; about {duration(left)} left for {len(self.costs)} run{'s' * (len(self.costs) > 1)}"
        )

    def end(self, run: StudyRun) -> None:
        """Note that `run` is trained and judged."""
        cost = self.costs.pop(run.folder, 0.0)
        self.seconds += time.perf_counter() - self.began
        self.done += cost


def _cost(run: StudyRun) -> float:
    """The expected turns of a run, over all its steps and samples; 1 where its length is that of
    its data."""
    config = run.config
    if config.train.steps is None:
        return 1.0
    return sum(expected_costs(config, 0.0)) * config.train.batch_size


def _begin(run: StudyRun, world: World) -> None:
    """Have a folder count as new in which a process died before the configuration was written."""
    folder = RunFolder(run.folder)
    if not world.first or not folder.path.is_dir() or folder.config.exists():
        return
    if latest(folder.checkpoints) is None:
        save_config(run.config, folder.config)


def _advice(run: StudyRun) -> str:
    if not run.folder.exists():
        return ""
    return f". If its folder is the cause, remove {run.folder} to start this run anew"


def _judge_new(run: StudyRun, world: World, records: Records) -> None:
    """On the first process.

    Raises:
        ConfigError: the run ended without results.
    """
    if not world.first:
        return
    if status(run, records) != "done":
        raise ConfigError(
            f"{run.folder} ended without results, which a study reads: it needs eval.turns, and of "
            "Ouro data.validation or eval.tasks"
        )
    _record(run, world, records)


def _record(run: StudyRun, world: World, records: Records) -> None:
    """Judge a run that is done, and keep its record."""
    if world.first:
        records.add(run, run_entry(run, world, records))


def status(run: StudyRun, records: Records) -> str:
    """done, failed or missing (which a run that was cut is too)."""
    if RunFolder(run.folder).results.exists() or records.of(run) is not None:
        return "done"
    return "failed" if note_of(run).exists() else "missing"


def run_entry(run: StudyRun, world: World, records: Records) -> dict[str, Any]:
    """Entry of a run in study.json: its setting and what came out, on the first process. What its
    record says, if it has one, by the names that this study has for the run."""
    names = {"label": run.label, "levels": run.levels, "overrides": run.overrides}
    if (record := records.of(run)) is not None:
        return record | names
    turns = run.config.trained_turns
    entry: dict[str, Any] = {
        **names,
        "seed": run.seed,
        "folder": run.folder.name,
        "status": status(run, records),
        "depth": round(run.config.depth.mean(), 2),
        "trained_turns": [turns] if isinstance(turns, int) else list(turns),
    }
    if entry["status"] == "failed":
        entry |= json.loads(note_of(run).read_text(encoding="utf-8"))
    elif entry["status"] == "done":
        entry |= judge_run(run.folder, world.device, run.judged)
        entry.pop("asked")
    return entry


def note_of(run: StudyRun) -> Path:
    """The file that says why a run failed; without it the run goes on."""
    return run.folder / "failed.json"


def _say(world: World, text: str) -> None:
    if world.first:
        print(text, flush=True)
