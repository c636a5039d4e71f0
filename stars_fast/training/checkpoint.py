"""Checkpoints: weights as safetensors, the rest as a state file, complete or not there at all."""

import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from stars_fast.training.durable import sync
from stars_fast.training.optional import need
from stars_fast.training.tree import ConfigError

MODEL, STATE = "model.safetensors", "state.pt"
_NAME = re.compile(r"step-(\d+)")


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, state: dict[str, Any], keep: int = 0
) -> Path:
    """Write `folder`/step-NNNNNN with the weights of `model` and `state`; return its path.

    Everything is written and flushed under another name and then renamed, so that a directory of
    that name is complete whenever the process dies. With `keep` > 0 only the newest `keep` stay.
    A checkpoint of `step` that is there already is left as it is.
    """
    path = folder / f"step-{step:06d}"
    if step not in checkpoints(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for left in (*folder.glob("writing-*"), *folder.glob("removing-*")):
            shutil.rmtree(left)
        if path.exists():  # what is left of one that was being removed
            shutil.rmtree(path)
        temporary = folder / f"writing-{step:06d}"
        temporary.mkdir()
        _safetensors().save_model(model, str(temporary / MODEL))
        torch.save(state, temporary / STATE)
        for written in (temporary / MODEL, temporary / STATE, temporary):
            sync(written)
        temporary.rename(path)
        sync(folder)
    complete = sorted(checkpoints(folder).items())
    for number, old in complete[: -keep or 0]:
        removing = folder / f"removing-{number:06d}"
        old.rename(removing)
        shutil.rmtree(removing)
    return path


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in `folder` by step."""
    found = {}
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / MODEL).is_file() and (path / STATE).is_file():
            found[int(match.group(1))] = path
    return found


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, None if there is none."""
    found = checkpoints(folder)
    return found[max(found)] if found else None


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load the weights of `checkpoint` into `model`, onto the device where each parameter is.

    Raises ConfigError if they do not fit it.
    """
    try:
        _safetensors().load_model(model, str(checkpoint / MODEL))
    except (RuntimeError, OSError, need("safetensors", "checkpoints").SafetensorError) as error:
        raise ConfigError(f"{checkpoint} does not fit the model, or is damaged: {error}") from error


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The state that `save_checkpoint` wrote, on the CPU."""
    return torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)


def _safetensors() -> ModuleType:
    return need("safetensors.torch", "checkpoints")
