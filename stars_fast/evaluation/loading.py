"""Where an Ouro model is, what tells it from others, and loading it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stars_fast.base.errors import ConfigError


@dataclass(frozen=True)
class ModelSource:
    """A run folder of Ouro, or a checkpoint in the public layout.

    path: as it was given. step: of the run's checkpoint. label: in tables.
    identity: plain values, equal for equal weights; of files their names, sizes and times of
        change.
    trained: turns of the training, a number or (fewest, most); none if not known.
    """

    path: str
    step: int | None
    label: str
    identity: dict[str, Any]
    trained: float | tuple[float, float] | None = None


def find_model(path: str, step: int | None) -> ModelSource:
    """The model at `path`, of the newest checkpoint of a run or that of `step`.

    Raises ConfigError if there is none, or it is not Ouro's.
    """
    from stars_fast.models.folders import check_exists, check_folder
    from stars_fast.models.ouro.export import BASE
    from stars_fast.training.config import load_config
    from stars_fast.training.run.folder import RunFolder

    folder = RunFolder(path)
    if folder.config.exists() and (folder.path / BASE / "config.json").exists():
        config = load_config(str(folder.config))
        checkpoint = folder.checkpoint(step)
        found = int("".join(filter(str.isdecimal, checkpoint.name)))
        identity = {"run": str(folder.path.resolve()), "step": found, "files": _stamps(checkpoint)}
        return ModelSource(path, found, config.name, identity, config.trained_turns)
    try:
        check_exists(path)
        check_folder(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if step is not None:
        raise ConfigError(f"--step: expected none for a checkpoint, which {path} is, got {step}")
    kind, revision = _read_config(path)
    if kind != "ouro":
        raise ConfigError(f"{path} must be an Ouro model (model_type ouro), got {kind!r}")
    if Path(path).is_dir():
        identity = {"folder": str(Path(path).resolve()), "files": _stamps(Path(path))}
    else:
        identity = {"hub": path, "revision": revision}
    return ModelSource(path, None, Path(path).resolve().name, identity)


def device_for(asked: str | None) -> str:
    """The device asked for, else the first GPU, else the CPU.

    Raises ConfigError for a device that is not there.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(asked or ("cuda" if there else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu, cuda, cuda:1, ..., got {asked!r}")
    if device.type == "cuda" and (device.index or 0) >= there:
        raise ConfigError(f"--device is {asked} but PyTorch sees {there} CUDA devices")
    return str(device)


def make_folder(out: Path) -> None:
    """Raises ConfigError if it can't be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} can't be made: {error}") from error


def load_model(source: ModelSource, dtype: torch.dtype | None, device: str) -> Any:
    """The model in evaluation mode, in `dtype` (its own by default)."""
    from stars_fast.models.ouro.export import model_of

    try:
        model, _ = model_of(source.path, source.step)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source.path}: {error}") from error
    return model.to(device=device, dtype=dtype or model.dtype).eval()


def load_tokenizer(source: ModelSource) -> Any:
    """Its tokenizer, of transformers."""
    from transformers import AutoTokenizer

    from stars_fast.models.ouro.export import BASE

    base = source.path if source.step is None else str(Path(source.path) / BASE)
    try:
        return AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source.path}: can't load its tokenizer: {error}") from error


def _read_config(path: str) -> tuple[str, str | None]:
    """The kind of a checkpoint, and its revision on the hub."""
    from transformers import PretrainedConfig
    from transformers.utils.hub import cached_file, extract_commit_hash

    from stars_fast.models.folders import not_loaded

    try:
        values, _ = PretrainedConfig.get_config_dict(path)
        found = None if Path(path).is_dir() else cached_file(path, "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(not_loaded(path, error)) from error
    return str(values.get("model_type")), extract_commit_hash(found, None)


def _stamps(folder: Path) -> str:
    """A hash of the names, sizes and times of change of a folder's files."""
    facts = [
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
