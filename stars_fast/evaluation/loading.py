"""The device and the folder that a command is given."""

from __future__ import annotations

from pathlib import Path

import torch

from stars_fast.base.errors import ConfigError


def device_for(asked: str | None) -> str:
    """The device asked for, else the first GPU, else the CPU.

    Raises:
        ConfigError: a device that is not there.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(asked or ("cuda" if there else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device: expected cpu, cuda, cuda:1, ..., got {asked!r}")
    if device.type == "cuda" and (device.index or 0) >= there:
        raise ConfigError(f"--device is {asked} but PyTorch sees {there} CUDA devices")
    return str(device)


def make_folder(out: Path) -> None:
    """Raise ConfigError if it can't be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} can't be made: {error}") from error
