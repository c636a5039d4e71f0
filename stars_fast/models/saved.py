"""Saved models, of whatever family: where one is, what tells it from others, and loading it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stars_fast.base import tree
from stars_fast.base.checkpoints import load_weights, read_state
from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.base.run_folder import RunFolder
from stars_fast.models.adapter_folder import adapter_base, load_adapter
from stars_fast.models.cast import cast
from stars_fast.models.depth import DepthLaw
from stars_fast.models.families import Family, family_of, section_of
from stars_fast.models.lora import LoraConfig, adapt, base_dtype, fingerprint
from stars_fast.models.reading import reading


@dataclass(frozen=True)
class ModelSource:
    """The checkpoint of a run, a checkpoint folder or hub id, or the folder of a PEFT adapter.

    path: as it was given. family: of the model. step: of the run's checkpoint; None for what is no
        run. label: in tables.
    identity: plain values, equal for equal weights; of files their names, sizes and times of
        change.
    trained: turns of the training, a number or (fewest, most); none if not known.
    base: folder or hub id of the model that an adapter's folder is for; none for what is no such.
    """

    path: str
    family: Family
    step: int | None
    label: str
    identity: dict[str, Any]
    trained: int | tuple[int, int] | None = None
    base: str | None = None

    @property
    def checkpoint(self) -> str:
        """Where `config.json` is, of what is no run."""
        return self.base or self.path

    @property
    def run(self) -> RunFolder:
        """The run folder, of what has a step."""
        return RunFolder(self.path)

    @property
    def beside(self) -> str:
        """Where the files beside its weights are."""
        return self.checkpoint if self.step is None else str(self.run.model)

    @property
    def lora(self) -> LoraConfig:
        """The adapters of a run.

        Raises:
            ConfigError: its configuration can't be read.
        """
        settings = self.run.settings() if self.run.config.exists() else {}
        return tree.build(LoraConfig, settings.get("lora", {}), "lora")

    @property
    def adapted(self) -> bool:
        """Whether its weights are those of a base model and of adapters."""
        return self.base is not None or (self.step is not None and self.lora.wanted)

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
    base = adapter_base(path)
    identity = identity_of(path)
    if base is not None:
        identity["base"] = identity_of(base)
    return ModelSource(path, family, None, label_of(path), identity, base=base)


def load_model(source: ModelSource, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
    """The model in evaluation mode, in `dtype` (its own by default); adapters are not merged.

    Raises:
        ConfigError: it can't be loaded, or adapters belong to another base.
    """
    model: Any
    if source.step is not None and source.adapted:
        model = _adapted_run(source)
    elif source.step is not None:
        model = source.family.outline(source.run)
        load_weights(source.run.checkpoint(source.step), model)
    else:
        with reading(source.checkpoint):
            model = source.family.load(source.checkpoint, dtype)
        if source.base is not None:
            with reading(source.path):
                load_adapter(source.path, model)
    return cast(model, dtype or next(model.parameters()).dtype, device).eval()


def _adapted_run(source: ModelSource) -> Any:
    """The base that a run started from, with the adapters of its checkpoint."""
    run, checkpoint = source.run, source.run.checkpoint(source.step)
    settings = run.settings()
    dtype = base_dtype(settings.get("precision", source.family.precision))
    seed = settings.get("seed", 0)
    model, _ = source.family.start(section_of(run), dtype, seed)
    adapt(source.family.loop(model), source.lora, torch.float32, seed)
    if fingerprint(model) != read_state(checkpoint)["state"]["base"]:
        raise ConfigError(
            f"{source.path}: the weights that its adapters were trained on are not those of its "
            "model.path any more"
        )
    load_weights(checkpoint, model, trained_alone=True)
    return model


def load_tokenizer(source: ModelSource) -> Any:
    """Its tokenizer, of transformers.

    Raises:
        ConfigError: it has none.
    """
    try:
        return source.family.tokenizer(tokenizer_place(source))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def tokenizer_place(source: ModelSource) -> str:
    """Where its tokenizer is: beside an adapter if there is one, else beside the weights."""
    own = source.base is not None and (Path(source.path) / "tokenizer_config.json").exists()
    return source.path if own else source.beside


def trained_turns(settings: dict[str, Any]) -> int | tuple[int, int] | None:
    """The turns of a run's training, from its settings; None where they don't say."""
    if "depth" not in settings:
        return None
    return tree.build(DepthLaw, settings["depth"], "depth").span


def label_of(path: str) -> str:
    """The name of a checkpoint in tables."""
    return Path(path).expanduser().resolve().name


def identity_of(path: str) -> dict[str, Any]:
    """Plain values, equal for equal weights: of a folder its place and its files' stamps, of a hub
    id the revision."""
    place = Path(path).expanduser()
    if place.is_dir():
        return {"folder": str(place.resolve()), "files": _stamps(place)}
    return {"hub": path, "revision": _revision(path)}


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
