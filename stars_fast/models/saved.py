"""Saved models, of whatever family: where one is, what tells it from others, and loading it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stars_fast.base import tree
from stars_fast.base.checkpoints import load_weights
from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.base.run_folder import RunFolder
from stars_fast.models.depth import DepthLaw
from stars_fast.models.families import Family, family_of
from stars_fast.models.folders import not_loaded


@dataclass(frozen=True)
class ModelSource:
    """The checkpoint of a run, or a checkpoint folder or hub id.

    path: as it was given. family: of the model. step: of the run's checkpoint; None for what is no
        run. label: in tables.
    identity: plain values, equal for equal weights; of files their names, sizes and times of
        change.
    trained: turns of the training, a number or (fewest, most); none if not known.
    """

    path: str
    family: Family
    step: int | None
    label: str
    identity: dict[str, Any]
    trained: int | tuple[int, int] | None = None

    @property
    def run(self) -> RunFolder:
        """The run folder, of what has a step."""
        return RunFolder(self.path)

    @property
    def beside(self) -> str:
        """Where the files beside its weights are, such as its tokenizer."""
        return self.path if self.step is None else str(self.run.model)

    def need_causal_lm(self, option: str) -> ModelSource:
        """Itself, if `option` can be had of its family.

        Raises:
            ConfigError: it needs causal language models of transformers.
        """
        if not self.family.causal_lm:
            raise ConfigError(
                f"{option}: expected causal language models of transformers, got {self.path}, a "
                f"model of {self.family.title}"
            )
        need("transformers", f"{self.family.title} models")
        return self


def find_model(path: str | Path, step: int | None = None) -> ModelSource:
    """The model at `path`, of the newest checkpoint of a run or that of `step`.

    Raises:
        ConfigError: there is none, or it is of no family.
    """
    path = str(path)
    family, run = family_of(path), RunFolder(path)
    if run.config.exists() or (run.model / "config.json").exists():
        settings = run.settings() if run.config.exists() else {}
        checkpoint = run.checkpoint(step)
        found = int(checkpoint.name.removeprefix("step-"))
        identity = {"run": str(run.path.resolve()), "step": found, "files": _stamps(checkpoint)}
        label = str(settings.get("name", run.path.resolve().name))
        return ModelSource(path, family, found, label, identity, trained_turns(settings))
    if step is not None:
        raise ConfigError(f"--step: expected none for a checkpoint, which {path} is, got {step}")
    place = Path(path).expanduser()
    if place.is_dir():
        identity = {"folder": str(place.resolve()), "files": _stamps(place)}
    else:
        identity = {"hub": path, "revision": _revision(path)}
    return ModelSource(path, family, None, place.resolve().name, identity)


def load_model(source: ModelSource, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """The model in evaluation mode, in `dtype` (its own by default).

    Raises:
        ConfigError: it can't be loaded.
    """
    model: Any
    if source.step is not None:
        model = source.family.outline(source.run)
        load_weights(source.run.checkpoint(source.step), model)
        dtype = dtype or next(model.parameters()).dtype
    else:
        try:
            model = source.family.load(source.path, dtype)
        except OSError as error:
            raise ConfigError(not_loaded(source.path, error)) from error
        except ValueError as error:
            raise ConfigError(f"{source.path}: {error}") from error
    return model.to(device=device, dtype=dtype).eval()


def load_tokenizer(source: ModelSource) -> Any:
    """Its tokenizer, of transformers.

    Raises:
        ConfigError: it has none.
    """
    try:
        return source.family.tokenizer(source.beside)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source.path}: can't load its tokenizer: {error}") from error


def trained_turns(settings: dict[str, Any]) -> int | tuple[int, int] | None:
    """The turns of a run's training, from its settings; None where they don't say."""
    if "depth" not in settings:
        return None
    return tree.build(DepthLaw, settings["depth"], "depth").span


def _revision(hub_id: str) -> str | None:
    from transformers.utils.hub import cached_file, extract_commit_hash

    return extract_commit_hash(cached_file(hub_id, "config.json"), None)


def _stamps(folder: Path) -> str:
    """A hash of the names, sizes and times of change of a folder's files."""
    facts = [
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
