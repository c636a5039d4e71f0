"""Reading the checkpoints of a run: which are complete, and what they hold.

Part of a checkpoint is a pickle, as PyTorch's distributed checkpoints are: load only those of runs
that you trust. `training.run.checkpoint` writes them. Whoever looks for a run imports this, so
what reads tensors loads where it is used: with it come torch's compilers, two seconds of CPU.
"""

from __future__ import annotations

import errno
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stars_fast.base.checksums import SUMS, checksum, read_checksums
from stars_fast.base.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA, STATE = ".metadata", "state.pt"
"""Files without which a checkpoint is not complete."""

MODEL_PREFIX = "model."
_NAME = re.compile(r"step-(\d+)")


def step_folders(folder: Path) -> dict[int, Path]:
    """The checkpoints in `folder` by step, also those that have lost a file since."""
    return {step_of(path): path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)}


def step_of(path: Path) -> int:
    """The step of a checkpoint, by the name of its directory; 0 for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else 0


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in `folder` by step."""
    return {
        step: path
        for step, path in step_folders(folder).items()
        if (path / METADATA).is_file() and (path / STATE).is_file()
    }


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, None if there is none."""
    found = checkpoints(folder)
    return found[max(found)] if found else None


def fault_of(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """A file of the checkpoint at `path` that is not as it was written, in words; None if all are.

    Every file is held against its checksum, which reads the whole of it. A checkpoint of before
    there were checksums is whole if all that it should hold is there.

    Args:
        path: the directory of a checkpoint.
        share, shares: the files are shared out; this is share number `share` of `shares`.

    Raises:
        ConfigError: the files can't be read just now, such as for want of permission.
    """
    name = SUMS
    try:
        sums = read_checksums(path)
        for name in (METADATA, STATE):
            if not (path / name).is_file():
                return f"{name} is missing"
            if sums is not None and name not in sums:
                return f"{SUMS} does not list {name}"
        if sums is None:
            return _fault_in_outline(path)
        for name in sorted(sums)[share::shares]:
            if checksum(path / name) != sums[name]:
                return f"{name} is not as it was written: its checksum differs"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        if error.errno == errno.EIO:
            return f"{name} can't be read: {error.strerror}"
        file = error.filename or path / name
        raise ConfigError(f"{file} can't be read: {error.strerror}") from error
    except ValueError as error:
        return str(error)
    return None


def _fault_in_outline(path: Path) -> str | None:
    """As `fault_of`, of a checkpoint without checksums: files that are missing or too short.

    Raises:
        OSError: a file can't be read.
    """
    try:
        places = read_metadata(path).storage_data.values()
        read_state(path)
    except ConfigError as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None  # of the system, and no sign of damage by itself
        return failure_reason(cause)
    for place in places:
        file = path / place.relative_path
        if not file.is_file():
            return f"{file.name} is missing"
        if file.stat().st_size < place.offset + place.length:
            return f"{file.name} is too short"
    return None


def check_whole(path: Path) -> None:
    """Raise ConfigError, which names the newest one before it that is whole, if the checkpoint at
    `path` is damaged."""
    if (fault := fault_of(path)) is not None:
        raise damaged(path, fault)


def damaged(path: Path, fault: str) -> ConfigError:
    """The error for a damaged checkpoint at `path`, with the newest before it that is whole."""
    others = sorted(checkpoints(path.parent).items(), reverse=True)
    before = (other for step, other in others if step < step_of(path))
    whole = next((other for other in before if fault_of(other) is None), None)
    hint = "" if whole is None else f"; {whole.name} before it is whole (--step {step_of(whole)})"
    return ConfigError(f"{path} is damaged, or no checkpoint: {fault}{hint}")


def load_weights(path: Path, model: nn.Module, trained_alone: bool = False) -> None:
    """Load the weights of the checkpoint at `path` into `model`; devices and dtypes stay its own.

    One process reads for itself, and needs no process group. With `trained_alone` the checkpoint
    holds the weights that want a gradient, and the others stay.

    Raises:
        ConfigError: the checkpoint does not fit the model, in a name or shape, or is damaged.
    """
    check_whole(path)
    saved = read_metadata(path)
    weights = weights_of(model, trained_alone)
    names = [name for name in saved.state_dict_metadata if name.startswith(MODEL_PREFIX)]
    check_fit(path, weights, saved, names, exact=False)
    read_tensors(path, weights, None)


def saved_tensors(path: Path) -> dict[str, Tensor]:
    """Everything but the small state of the checkpoint at `path`, on the CPU: weights as
    "model.NAME", the optimiser's as "optimizer.NAME.KEY".

    Raises:
        ConfigError: it is damaged.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    check_whole(path)
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in read_metadata(path).state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    read_tensors(path, tensors, None)
    return tensors


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, as `get_model_state_dict` names them; a tied one by its first."""
    return {_plain(name): parameter for name, parameter in model.named_parameters()}


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")  # of a module inside `torch.compile`


def weights_of(model: nn.Module, trained_alone: bool = False) -> dict[str, Tensor]:
    """The tensors of `model` as a checkpoint holds them: references; a tied parameter once; with
    `trained_alone` the parameters that want a gradient and nothing else.

    It brings an FSDP model into its shards, so it comes before `parameters_of`.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    weights = get_model_state_dict(model)
    own = parameters_of(model)
    if trained_alone:
        kept = {name for name, parameter in own.items() if parameter.requires_grad}
    else:
        every = {_plain(name) for name, _ in model.named_parameters(remove_duplicate=False)}
        kept = weights.keys() - (every - own.keys())
    return named_tensors(MODEL_PREFIX, {name: weights[name] for name in weights if name in kept})


def named_tensors(prefix: str, values: dict[str, Any]) -> dict[str, Tensor]:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{prefix}{name}: a checkpoint holds tensors alone, got {type(value).__name__}"
            )
    return {prefix + name: value for name, value in values.items()}


def check_fit(
    path: Path, wanted: dict[str, Tensor], saved: Metadata, names: Iterable[str], exact: bool
) -> None:
    """Raise ConfigError unless `names`, in the checkpoint, are those of `wanted`, of their shapes
    and with `exact` of their dtypes."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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


def read_metadata(path: Path) -> Metadata:
    from torch.distributed.checkpoint import FileSystemReader

    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged_checkpoint(path, error) from error


def read_tensors(path: Path, targets: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill `targets` in place; with `group`, an error on one process is one on all."""
    import torch.distributed.checkpoint as dcp

    hush_one_process()
    reader = dcp.FileSystemReader(path)
    try:
        dcp.load(dict(targets), storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as error:
        raise damaged_checkpoint(path, error) from error


def read_state(path: Path) -> dict[str, Any]:
    """The small part of a checkpoint: the `state` that was saved and the optimiser's `groups`, on
    the CPU.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    try:
        return torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged_checkpoint(path, error) from error


def damaged_checkpoint(path: Path, error: BaseException) -> ConfigError:
    return ConfigError(f"{path} is damaged, or no checkpoint: {failure_reason(error)}")


def failure_reason(error: BaseException) -> str:
    """The first error, without the tracebacks of all processes."""
    error = first_failure(error)
    return f"{type(error).__name__}: {error}"


def first_failure(error: BaseException) -> BaseException:
    """The error itself, or of those of several processes the first."""
    from torch.distributed.checkpoint import CheckpointException

    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def hush_one_process() -> None:
    """One process alone is meant, and no reason for a warning. For good: what a context of
    `warnings` restores, it restores for all threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
