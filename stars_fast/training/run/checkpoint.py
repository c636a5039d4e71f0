"""Checkpoints of a run: written by all its processes beside the training, complete or not there.

`base.checkpoints` reads them.
"""

import io
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from stars_fast.base.checkpoints import (
    METADATA,
    STATE,
    check_fit,
    checkpoints,
    damaged,
    failure_reason,
    fault_of,
    first_failure,
    hush_one_process,
    named_tensors,
    parameters_of,
    read_metadata,
    read_state,
    read_tensors,
    step_folders,
    weights_of,
)
from stars_fast.base.checksums import checksum, write_checksums
from stars_fast.base.claim import Claim
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import cant_write, os_error, sync
from stars_fast.training.scale.distributed import World, settle

T = TypeVar("T")

_OPTIMIZER = "optimizer."
_HOW = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Entries of a param group that are not restored: what it is over, and how a step is computed."""
_LONG = 20.0
"""Seconds from which a save may not fit between torchrun's SIGTERM and its SIGKILL."""
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Torchrun's variable for the seconds between the two."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


class _Writer(dcp.FileSystemWriter):
    """Torch's writer of one process's files, with their names in `written`, and with the system's
    own error where torch tells one that came of it, such as "unexpected pos 704 vs 598"."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)
        self.written: set[str] = set()

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        try:
            results = super().write_data(plan, planner)
        except Exception as error:
            raise os_error(error) or error from None
        self.written = {result.storage_data.relative_path for result in results.value()}
        return results


class Checkpoints:
    """The checkpoints of a run in `folder`, of which the newest `keep` stay (0: all).

    Every process of `world` makes one and calls its methods, all in the same order. A checkpoint is
    a directory step-NNNNNN of distributed-checkpoint files, in which each process writes its share,
    a file of small state, and the checksums of all these. It is written and flushed under another
    name and then renamed, so that a directory of that name is complete whenever a process dies.
    With `trained_alone` it holds of the weights those that want a gradient: the others never
    change, and are elsewhere.

    A save that fails is told to `say` at once, on the first process, and the next one is tried all
    the same. With `claim` nothing is written or removed once another process owns the folder.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        keep: int = 0,
        trained_alone: bool = False,
        say: Callable[[str], None] = lambda text: None,
        claim: Claim | None = None,
    ) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep
        self._trained_alone = trained_alone
        self._say = say
        self._claim = claim
        # The thread's collectives go through a group of their own: in the group of the training
        # they would mix with those of the main thread.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._told: set[str] = set()
        """Names of what is told once alone."""

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy the state of a run after `step` to host memory; it is written in a thread.

        A checkpoint of `step` that is there already is left as it is. Whether the save before this
        one failed makes no difference.

        Args:
            step: number of steps done.
            model: not wrapped in DDP; its parameters may be DTensors.
            optimizer: over parameters of `model`.
            state: plain values and small tensors, the same on all processes.
            before: is called in the thread on the first process; the save fails if it does.

        Raises:
            TypeError: the model or the optimiser holds state that is not a tensor.
        """
        with suppress(SaveError):  # which has been told
            self.wait()
        tensors = weights_of(model, self._trained_alone)
        for name, parameter in parameters_of(model).items():
            tensors |= _slots(name, optimizer.state.get(parameter, {}))
        staged = {
            # What all processes hold whole is shared out among them
            name: tensor.detach().to("cpu", copy=True)
            for index, (name, tensor) in enumerate(tensors.items())
            if isinstance(tensor, DTensor) or index % self._world.size == self._world.rank
        }
        rest = io.BytesIO()  # a copy too: what it was made of goes on changing
        torch.save({"state": state, "groups": _groups(model, optimizer)}, rest)
        self._writing = self._thread.submit(self._write, step, staged, rest, before)

    def wait(self) -> None:
        """Return once the last save is complete.

        Raises:
            SaveError: it failed, on this process or another.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait for the last save, failed or not, and end the thread and its group."""
        self._thread.shutdown()
        if self._group is not None:
            settle()
            dist.destroy_process_group(self._group)

    def whole(self) -> Path | None:
        """The newest checkpoint whose files are as they were written, None if there is none at all.

        Newer ones that are damaged are told, and set aside under the name damaged-NNNNNN, so that
        the run goes on from this one and can write theirs again.

        Raises:
            ConfigError: all there are are damaged.
        """
        folders = self._world.from_first(step_folders(self.folder))
        faults: dict[Path, str] = {}
        for _, path in sorted(folders.items(), reverse=True):
            fault = self._fault(path)
            if fault is None:
                self._first(partial(self._set_aside, faults, path))
                return path
            faults[path] = fault
        if faults:
            path, fault = next(iter(faults.items()))
            raise ConfigError(
                f"{damaged(path, fault)}; no checkpoint of this run is whole, so it can't go on: "
                "start anew in another folder with --out"
            )
        return None

    def load(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Continue from the checkpoint at `path`, of any number of processes, sharded or not.

        The weights and the optimiser's state and settings are replaced, bit for bit.

        Args:
            path: the directory of a checkpoint.
            model: as in `save`.
            optimizer: as it was made; it has taken no step and there are no gradients.

        Returns:
            The `state` that was saved, on the CPU.

        Raises:
            ConfigError: the checkpoint does not fit, in a name, shape or dtype, or is damaged, as
                far as that shows without `whole`.
        """
        self.wait()
        saved = read_metadata(path)
        targets = weights_of(model, self._trained_alone)
        # Most optimisers make their state in the first step. This call has one without state take
        # a step with zero gradients at learning rate zero; all that it may move is loaded below.
        get_optimizer_state_dict(model, optimizer)
        for name, parameter in parameters_of(model).items():
            slots = _slots(name, optimizer.state.get(parameter, {}))
            if slots.keys().isdisjoint(saved.state_dict_metadata):
                optimizer.state.pop(parameter, None)  # it has had no gradient yet
            else:
                targets |= slots
        check_fit(path, targets, saved, saved.state_dict_metadata, exact=True)
        rest = read_state(path)
        read_tensors(path, targets, self._group)
        _restore_groups(path, model, optimizer, rest["groups"])
        return rest["state"]

    def _write(
        self, step: int, tensors: dict[str, Tensor], rest: io.BytesIO, before: Callable[[], None]
    ) -> None:
        """In the thread: one checkpoint from beginning to end, together with other processes."""
        path, temporary = self.folder / f"step-{step:06d}", self.folder / f"writing-{step:06d}"
        start = time.monotonic()
        try:
            self._first(before)
            if self._first(lambda: self._begin(step, path, temporary)):
                return
            hush_one_process()
            writer = _Writer(temporary)
            dcp.save(
                tensors,
                storage_writer=writer,
                process_group=self._group,
                no_dist=self._group is None,
            )
            sums = self._gather(
                lambda: {each: checksum(temporary / each) for each in writer.written}
            )
            self._first(lambda: self._finish(temporary, path, rest, sums))
            self._first(lambda: self._warn_of_torchrun(path, time.monotonic() - start))
        except (Exception, dcp.CheckpointException) as error:
            raise self._failed(step, temporary, error) from error

    def _failed(self, step: int, temporary: Path, error: BaseException) -> SaveError:
        """Tell what became of a save, and make room: what is left of it may fill the disk."""
        cause = os_error(first_failure(error))
        reason = failure_reason(error) if cause is None else cant_write(self.folder, cause)
        what = f"the checkpoint of step {step} in {self.folder} could not be written: {reason}"
        if self._world.first:
            shutil.rmtree(temporary, ignore_errors=True)
            self._say(f"warning: {what}")
        return SaveError(what)

    def _begin(self, step: int, path: Path, temporary: Path) -> bool:
        """Make room for a checkpoint; True if it is there already."""
        self._check_claim()
        if step in checkpoints(self.folder):
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in (*self.folder.glob("writing-*"), *self.folder.glob("removing-*")):
            if left != temporary:
                self._remove(left, left)
        for mine in (temporary, path):  # of `path` what is left of one that was damaged
            if mine.exists():
                shutil.rmtree(mine)
        return False

    def _finish(
        self, temporary: Path, path: Path, rest: io.BytesIO, sums: list[dict[str, str]]
    ) -> None:
        """Give a checkpoint its name, now that all its tensors are written, and remove old ones."""
        (temporary / STATE).write_bytes(rest.getbuffer())
        sync(temporary / STATE)
        small = {name: checksum(temporary / name) for name in (METADATA, STATE)}
        every = {name: value for each in (*sums, small) for name, value in each.items()}
        if lost := [name for name in sorted(every) if not (temporary / name).is_file()]:
            raise RuntimeError(
                f"{lost[0]}, which another process wrote, is not there: all machines must see one "
                "file system"
            )
        write_checksums(temporary, every)
        sync(temporary)
        self._check_claim()
        temporary.rename(path)
        sync(self.folder)
        for number, old in sorted(checkpoints(self.folder).items())[: -self._keep or 0]:
            self._remove(old, self.folder / f"removing-{number:06d}")

    def _remove(self, old: Path, removing: Path) -> None:
        """Remove a folder, which is called `removing` meanwhile."""
        try:
            old.rename(removing)
            shutil.rmtree(removing)
        except OSError as error:  # new checkpoints are whole all the same
            self._say_once(removing.name, f"warning: {old} could not be removed: {error.strerror}")

    def _warn_of_torchrun(self, path: Path, seconds: float) -> None:
        """Tell that torchrun may not wait for a save that takes so long."""
        if seconds > _LONG and dist.is_torchelastic_launched() and _SHUTDOWN not in os.environ:
            self._say_once(
                _SHUTDOWN,
                f"warning: {path.name} took {seconds:.0f} s to write. Unless its "
                "--shutdown-timeout says otherwise, torchrun kills its processes 30 s after a "
                "SIGTERM, and what they save then may be lost",
            )

    def _say_once(self, name: str, text: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._say(text)

    def _check_claim(self) -> None:
        if self._claim is not None and not self._claim.check():
            raise RuntimeError(f"its folder belongs to {self._claim.successor} now")

    def _fault(self, path: Path) -> str | None:
        """As `fault_of`, all processes together."""
        found = self._gather(lambda: fault_of(path, self._world.rank, self._world.size))
        return next((fault for fault in found if fault is not None), None)

    def _set_aside(self, faults: dict[Path, str], whole: Path) -> None:
        for path, fault in faults.items():
            aside = path.with_name(path.name.replace("step-", "damaged-"))
            number = 1
            while aside.exists():
                number += 1
                aside = aside.with_name(f"{path.name.replace('step-', 'damaged-')}.{number}")
            path.rename(aside)
            self._say(
                f"warning: {path} is damaged: {fault}. It is kept as {aside.name}; the run "
                f"continues from {whole.name}, the newest that is whole, and the steps after it "
                "are run again"
            )

    def _first(self, work: Callable[[], T]) -> T:
        """Give all processes the result of `work` on the first, or the error it raises."""
        return cast(T, self._gather(lambda: work() if self._world.first else None)[0])

    def _gather(self, work: Callable[[], T]) -> list[T]:
        """Give all processes the results of `work` on each, by rank, or the first error."""
        mine: list[Any] = [None, None]
        try:
            mine[0] = work()
        except Exception as error:  # whatever it is, the others wait to be told
            mine[1] = error
        outcomes = [mine] * self._world.size
        if self._group is not None:
            dist.all_gather_object(outcomes, mine, group=self._group)
        for _, failure in outcomes:
            if failure is not None:
                raise failure
        return [result for result, _ in outcomes]


def _slots(name: str, state: dict[str, Any]) -> dict[str, Tensor]:
    """The optimiser's `state` of one parameter as a checkpoint holds it: references."""
    return named_tensors(f"{_OPTIMIZER}{name}.", state)


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The param groups, with the names of their parameters."""
    names = {parameter: name for name, parameter in parameters_of(model).items()}
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _restore_groups(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]
) -> None:
    """Set what the param groups hold besides parameters, such as the learning rate."""
    names = [group["params"] for group in _groups(model, optimizer)]
    if names != [group["params"] for group in saved]:
        raise ConfigError(f"{path} does not fit: its optimiser groups the parameters otherwise")
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key in values.keys() - _HOW:
            if isinstance(group.get(key), Tensor):  # it may be known to a compiled step
                group[key].copy_(values[key])
            else:
                group[key] = values[key]
