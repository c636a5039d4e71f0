"""Reading the checkpoints of a run: which are complete, and what they hold.

Part of a checkpoint is a pickle, as PyTorch's distributed checkpoints are: load only those of runs
that you trust. `training.run.checkpoint` writes them.
"""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from stars_fast.base.errors import ConfigError

METADATA, STATE = ".metadata", "state.pt"
"""Files without which a checkpoint is not complete."""

MODEL_PREFIX = "model."
_NAME = re.compile(r"step-(\d+)")


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


def load_weights(path: Path, model: nn.Module, trained_alone: bool = False) -> None:
    """Load the weights of the checkpoint at `path` into `model`; devices and dtypes stay its own.

    One process reads for itself, and needs no process group. With `trained_alone` the checkpoint
    holds the weights that want a gradient, and the others stay.

    Raises:
        ConfigError: the checkpoint does not fit the model, in a name or shape, or is damaged.
    """
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
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged_checkpoint(path, error) from error


def read_tensors(path: Path, targets: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill `targets` in place; with `group`, an error on one process is one on all."""
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
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


def hush_one_process() -> None:
    """One process alone is meant, and no reason for a warning. For good: what a context of
    `warnings` restores, it restores for all threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
