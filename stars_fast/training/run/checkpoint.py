"""Checkpoints of a run: written by all its processes beside the training, complete or not there.

Part of a checkpoint is a pickle, as PyTorch's distributed checkpoints are: load only those of runs
that you trust.
"""

import io
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import sync
from stars_fast.training.scale.distributed import World

METADATA, STATE = ".metadata", "state.pt"
_NAME = re.compile(r"step-(\d+)")
_MODEL, _OPTIMIZER = "model.", "optimizer."
_HOW = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Entries of a param group that are not restored: what it is over, and how a step is computed."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


class Checkpoints:
    """The checkpoints of a run in `folder`, of which the newest `keep` stay (0: all).

    Every process of `world` makes one and calls its methods, all in the same order. A checkpoint is
    a directory step-NNNNNN of distributed-checkpoint files, in which each process writes its share,
    and a file of small state. It is written and flushed under another name and then renamed, so
    that a directory of that name is complete whenever a process dies.
    """

    def __init__(self, folder: Path, world: World, keep: int = 0) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep
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
        tensors = _weights(model)
        for name, parameter in _parameters(model).items():
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
                f"{_reason(error)}"
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
        saved = _metadata(path)
        targets = _weights(model)
        # Most optimisers make their state in the first step. This call has one without state take
        # a step with zero gradients at learning rate zero; all that it may move is loaded below.
        get_optimizer_state_dict(model, optimizer)
        for name, parameter in _parameters(model).items():
            slots = _slots(name, optimizer.state.get(parameter, {}))
            if slots.keys().isdisjoint(saved.state_dict_metadata):
                optimizer.state.pop(parameter, None)  # it has had no gradient yet
            else:
                targets |= slots
        _check(path, targets, saved, saved.state_dict_metadata, exact=True)
        rest = _rest(path)
        _read(path, targets, self._group)
        _restore_groups(path, model, optimizer, rest["groups"])
        return rest["state"]

    def _write(self, step: int, tensors: dict[str, Tensor], rest: io.BytesIO) -> None:
        """In the thread: one checkpoint from beginning to end, together with other processes."""
        path, temporary = self.folder / f"step-{step:06d}", self.folder / f"writing-{step:06d}"
        if self._first(lambda: self._begin(step, path)):
            return
        _quiet()
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
        """What `work` gives on the first process, on all of them, and so the error it raises."""
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


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in `folder` by step."""
    found = {}
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / METADATA).is_file() and (path / STATE).is_file():
            found[int(match.group(1))] = path
    return found


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, None if there is none."""
    found = checkpoints(folder)
    return found[max(found)] if found else None


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of the checkpoint at `path` into `model`; devices and dtypes stay its own.

    One process reads for itself, and needs no process group.

    Raises:
        ConfigError: the checkpoint does not fit the model, in a name or shape, or is damaged.
    """
    saved = _metadata(path)
    weights = _weights(model)
    names = [name for name in saved.state_dict_metadata if name.startswith(_MODEL)]
    _check(path, weights, saved, names, exact=False)
    _read(path, weights, None)


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """Everything but the small state of the checkpoint at `path`, on the CPU: weights as
    "model.NAME", the optimiser's as "optimizer.NAME.KEY".

    Raises:
        ConfigError: it is damaged.
    """
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in _metadata(path).state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    _read(path, tensors, None)
    return tensors


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, as `get_model_state_dict` names them; a tied one by its first."""
    return {_plain(name): parameter for name, parameter in model.named_parameters()}


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")  # of a module inside `torch.compile`


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of `model`: references, not copies; a tied parameter once.

    It brings an FSDP model into its shards, so it comes before `_parameters`.
    """
    weights = get_model_state_dict(model)
    every = {_plain(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = every - _parameters(model).keys()
    return _tensors(_MODEL, {name: weights[name] for name in weights if name not in tied})


def _slots(name: str, state: dict[str, Any]) -> dict[str, Tensor]:
    """What a checkpoint holds of the optimiser's `state` of one parameter: references."""
    return _tensors(f"{_OPTIMIZER}{name}.", state)


def _tensors(prefix: str, values: dict[str, Any]) -> dict[str, Tensor]:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{prefix}{name}: a checkpoint holds tensors alone, got {type(value).__name__}"
            )
    return {prefix + name: value for name, value in values.items()}


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The param groups, with the names of their parameters."""
    names = {parameter: name for name, parameter in _parameters(model).items()}
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


def _check(
    path: Path, wanted: dict[str, Tensor], saved: Metadata, names: Iterable[str], exact: bool
) -> None:
    """Raise ConfigError unless `names`, in the checkpoint, are those of `wanted`, of their shapes
    and with `exact` of their dtypes."""
    entries = {name: saved.state_dict_metadata[name] for name in names}
    other = []
    for name in wanted.keys() & entries.keys():
        there, here = entries[name], wanted[name]
        if not isinstance(there, TensorStorageMetadata):
            other.append(f"{name} (no tensor there)")
        elif there.size != here.shape:
            other.append(f"{name} ({list(there.size)} there, {list(here.shape)} here)")
        elif exact and there.properties.dtype != here.dtype:
            other.append(f"{name} ({there.properties.dtype} there, {here.dtype} here)")
    found = (
        ("missing", sorted(wanted.keys() - entries.keys())),
        ("not expected", sorted(entries.keys() - wanted.keys())),
        ("of another shape or dtype", sorted(other)),
    )
    problems = [f"{len(keys)} keys are {what}: {_some(keys)}" for what, keys in found if keys]
    if problems:
        raise ConfigError(f"{path} does not fit: " + "; ".join(problems))


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "")


def _metadata(path: Path) -> Metadata:
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged(path, error) from error


def _rest(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # as above
        raise _damaged(path, error) from error


def _read(path: Path, targets: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill `targets` in place; with `group`, an error on one process is one on all."""
    _quiet()
    reader = dcp.FileSystemReader(path)
    try:
        dcp.load(dict(targets), storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> ConfigError:
    return ConfigError(f"{path} is damaged, or no checkpoint: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """What went wrong first, without the tracebacks of all processes."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


def _quiet() -> None:
    """One process alone is meant, and no reason for a warning. For good: what a context of
    `warnings` restores, it restores for all threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
