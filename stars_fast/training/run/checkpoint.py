"""Checkpoints of a run: written by all its processes beside the training, complete or not there.

`base.checkpoints` reads them.
"""

import io
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from stars_fast.base.checkpoints import (
    STATE,
    check_fit,
    checkpoints,
    failure_reason,
    hush_one_process,
    named_tensors,
    parameters_of,
    read_metadata,
    read_state,
    read_tensors,
    weights_of,
)
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import sync
from stars_fast.training.scale.distributed import World

_OPTIMIZER = "optimizer."
_HOW = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Entries of a param group that are not restored: what it is over, and how a step is computed."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


class Checkpoints:
    """The checkpoints of a run in `folder`, of which the newest `keep` stay (0: all).

    Every process of `world` makes one and calls its methods, all in the same order. A checkpoint is
    a directory step-NNNNNN of distributed-checkpoint files, in which each process writes its share,
    and a file of small state. It is written and flushed under another name and then renamed, so
    that a directory of that name is complete whenever a process dies. With `trained_alone` it holds
    of the weights those that want a gradient: the others never change, and are elsewhere.
    """

    def __init__(
        self, folder: Path, world: World, keep: int = 0, trained_alone: bool = False
    ) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep
        self._trained_alone = trained_alone
        # The thread's collectives go through a group of their own: in the group of the training
        # they would mix with those of the main thread.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[None]] | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
    ) -> None:
        """Copy the state of a run after `step` to host memory; it is written in a thread.

        A checkpoint of `step` that is there already is left as it is.

        Args:
            step: number of steps done.
            model: not wrapped in DDP; its parameters may be DTensors.
            optimizer: over parameters of `model`.
            state: plain values and small tensors, the same on all processes.

        Raises:
            SaveError: the save before this one failed.
            TypeError: the model or the optimiser holds state that is not a tensor.
        """
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
        self._writing = step, self._thread.submit(self._write, step, staged, rest)

    def wait(self) -> None:
        """Return once the last save is complete.

        Raises:
            SaveError: it failed, on this process or another.
        """
        if self._writing is None:
            return
        step, written = self._writing
        error = written.exception()
        self._writing = None
        if error is not None:
            raise SaveError(
                f"the checkpoint of step {step} in {self.folder} could not be written: "
                f"{failure_reason(error)}"
            ) from error

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
            ConfigError: the checkpoint does not fit, in a name, shape or dtype, or is damaged.
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

    def _write(self, step: int, tensors: dict[str, Tensor], rest: io.BytesIO) -> None:
        """In the thread: one checkpoint from beginning to end, together with other processes."""
        path, temporary = self.folder / f"step-{step:06d}", self.folder / f"writing-{step:06d}"
        if self._first(lambda: self._begin(step, path)):
            return
        hush_one_process()
        writer = dcp.FileSystemWriter(temporary, sync_files=True)
        dcp.save(
            tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None
        )
        self._first(lambda: self._finish(temporary, path, rest))

    def _begin(self, step: int, path: Path) -> bool:
        """Make room for a checkpoint; True if it is there already."""
        if step in checkpoints(self.folder):
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in (*self.folder.glob("writing-*"), *self.folder.glob("removing-*")):
            shutil.rmtree(left)
        if path.exists():  # what is left of one that was damaged
            shutil.rmtree(path)
        return False

    def _finish(self, temporary: Path, path: Path, rest: io.BytesIO) -> None:
        """Give a checkpoint its name, now that all its tensors are written, and remove old ones."""
        (temporary / STATE).write_bytes(rest.getbuffer())
        sync(temporary / STATE)
        sync(temporary)
        temporary.rename(path)
        sync(self.folder)
        for number, old in sorted(checkpoints(self.folder).items())[: -self._keep or 0]:
            removing = self.folder / f"removing-{number:06d}"
            old.rename(removing)
            shutil.rmtree(removing)

    def _first(self, work: Callable[[], bool | None]) -> bool | None:
        """Give all processes the result of `work` on the first, or the error it raises."""
        outcome: list[Any] = [None, None]
        if self._world.first:
            try:
                outcome[0] = work()
            except Exception as error:  # whatever it is, the others wait to be told
                outcome[1] = error
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


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
