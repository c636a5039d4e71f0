"""The families of looped models: one file of this folder each, which defines `FAMILY`.

A family knows its `model` section of a recipe, its checkpoints, and its models in parts (`Loop`).
All that is above the models (training, evaluation, analysis, export) asks it, so that another
family is one more file here. Files of families import quickly: what needs transformers is imported
where it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stars_fast.base import tree
from stars_fast.base.choices import names_of
from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.models.adapter_folder import adapter_base
from stars_fast.models.folders import check_exists, check_folder, not_loaded, read_json
from stars_fast.models.loop import Loop
from stars_fast.models.reading import read_tokenizer
from stars_fast.models.shape import Shape

_ORIGIN = {"_name_or_path", "transformers_version", "dtype", "auto_map"}
"""Fields of a `config.json` that say where and in which form a checkpoint lies."""
_ASKS_HUB = ContextVar("asks_hub", default=True)


class Family(ABC):
    """A kind of looped model.

    Attributes:
        title: its name for people.
        model_type: what `config.json` of its checkpoints says.
        section: the dataclass of a recipe's section `model`; its field `family` is the name of the
            file.
        from_data: fields of the section that follow from the data where a recipe gives none.
        precision: of a run whose recipe gives none.
        shards: whether a run may share its weights out among processes.
        captures: whether a turn asks no tensor for its values, so that a CUDA graph can capture it.
        packs: whether a turn keeps documents that follow each other in one row apart.
        causal_lm: whether its models are causal language models of transformers with their turns
            in the configuration, as lm-eval and `generate` of transformers take them.
        code: the module of `models.portable` that opens its checkpoints without this package; None
            where there is none.
    """

    title: ClassVar[str]
    model_type: ClassVar[str]
    section: ClassVar[type]
    from_data: ClassVar[tuple[str, ...]] = ()
    precision: ClassVar[str] = "mixed"
    shards: ClassVar[bool] = True
    captures: ClassVar[bool] = True
    packs: ClassVar[bool] = False
    causal_lm: ClassVar[bool] = False
    code: ClassVar[str | None] = None

    @property
    def name(self) -> str:
        """That of its file, by which recipes know it."""
        return type(self).__module__.rpartition(".")[2]

    def describe(self, section: Any) -> str:
        """The model of a section in a few words."""
        return self.title

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this `config.json` is one of its own."""
        return config.get("model_type") == self.model_type

    def injects(self, section: Any) -> bool:
        """Whether a turn of a section's model takes in the prelude's output besides the state."""
        return False

    def turns_of(self, config: Mapping[str, Any]) -> int | None:
        """The turns that a checkpoint with this `config.json` takes; None where it does not say."""
        return None

    def fitted(self, section: dict[str, Any], tokens: int | None, length: int) -> dict[str, Any]:
        """The section `model` as a recipe gives it, with what follows from the data.

        Args:
            section: plain values; what they give stays.
            tokens: token ids of data that bring their own; None where the model's tokenizer does.
            length: most tokens of a row of the data.

        Raises:
            ConfigError: the section gives less than the data need.
        """
        return section

    def unread(self, section: Any) -> dict[str, str]:
        """Fields of a section that are not read, the others being what they are, and why."""
        return {}

    def shape(self, section: Any) -> Shape:
        """The sizes of a section's model, told without making it.

        Raises:
            ConfigError: they can't be told.
        """
        raise ConfigError(f"model.family: the sizes of {self.name} can't be told without a model")

    def skeleton(self, section: Any) -> nn.Module | None:
        """The model of a section on the meta device, for the names and sizes of its weights; None
        where it can't be made without them.

        Raises:
            ConfigError: the sizes can't be told.
        """
        return None

    def base(self, section: Any) -> str | None:
        """The checkpoint, a folder or hub id, whose weights a training starts from; None for
        weights that the package makes."""
        return None

    @abstractmethod
    def start(self, section: Any, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Any]:
        """The model that a training begins with, on the CPU, and its tokenizer, None without one.

        Args:
            section: of `Family.section`.
            dtype: of its parameters.
            seed: of the run; initial weights follow from it.

        Raises:
            ConfigError: there is no such model.
        """

    def keep(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Write what a run's checkpoints of weights lack to be a model: of one of transformers its
        configuration, that of generation and the tokenizer.

        Args:
            folder: `RunFolder.model`.
        """
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def differing(self, model: Any, folder: Path) -> list[str]:
        """Fields of a model's configuration that are others than `keep` wrote, by name, but for
        those of where it was loaded from and by what.

        Args:
            folder: `RunFolder.model`.
        """
        kept = type(model.config).from_pretrained(folder)
        before, now = (_without_origin(each.to_dict()) for each in (kept, model.config))
        return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))

    @abstractmethod
    def outline(self, run: RunFolder) -> nn.Module:
        """The model of a run, on the CPU, whose weights are still to be loaded."""

    @abstractmethod
    def load(self, path: str, dtype: torch.dtype | None) -> nn.Module:
        """The model of a checkpoint folder or of the hub, on the CPU; `dtype` None is its own.

        Raises:
            OSError, ValueError: it can't be loaded, or holds other weights than the model.
        """

    def foreign_code(self, model: Any) -> str | None:
        """The code that a model needs besides `code` and transformers; None where it needs none."""
        return None

    def tokenizer(self, path: str) -> Any:
        """The tokenizer, of transformers, of a folder or of the hub.

        Raises:
            ValueError: it has none.
        """
        return read_tokenizer(path)

    @abstractmethod
    def loop(self, model: Any) -> Loop:
        """The model in parts."""

    @abstractmethod
    def export(
        self,
        model: Any,
        folder: Path,
        *,
        beside: str,
        dtype: torch.dtype | None,
        turns: int | None,
        shard: str,
    ) -> None:
        """Write a checkpoint that `load` reads.

        Args:
            folder: it is made.
            beside: where the model's other files are: the checkpoint, or a run's `RunFolder.model`.
            dtype: of the weights; that of the model's configuration by default.
            turns: to be written as those of the model; its own by default.
            shard: most bytes of a file of weights, such as "5GB".
        """

    @abstractmethod
    def generate(self, model: Any, tokens: Tensor, turns: int, max_new_tokens: int) -> Tensor:
        """Greedy continuation of prompts of one length, `turns` turns for every new token.

        Args:
            tokens: [B, S] int64.

        Returns:
            [B, S + N] int64, N <= `max_new_tokens`.
        """


def _without_origin(config: Any) -> Any:
    """The plain values of a configuration, also inside of it, without those of its origin."""
    if not isinstance(config, Mapping):
        return config
    return {k: _without_origin(v) for k, v in config.items() if k not in _ORIGIN}


@cache
def families() -> dict[str, Family]:
    """Every family by name."""
    names = sorted(module.name for module in iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}").FAMILY for name in names}


def family_named(name: str) -> Family:
    """The family of a recipe's `model.family`.

    Raises:
        ConfigError: there is none.
    """
    if name not in families():
        raise ConfigError(f"model.family: expected one of {', '.join(families())}, got {name!r}")
    return families()[name]


def family_of(path: str | Path) -> Family:
    """The family of a run folder, a checkpoint folder, a PEFT adapter's folder or a hub id.

    Raises:
        ConfigError: there is no model, or it is of no family.
    """
    run = RunFolder(path)
    if run.config.exists():
        return family_named(names_of(run.settings())[0])
    try:
        base = adapter_base(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if base is not None:
        try:
            return family_of(base)
        except ConfigError as error:
            raise ConfigError(f"{path}: the base model of the adapter: {error}") from error
    types = tuple(each.model_type for each in families().values())
    if not (run.model / "config.json").exists():
        try:
            check_exists(path)
            check_folder(path, types)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    config = checkpoint_config(run.model if run.model.is_dir() else path)
    for each in families().values():
        if each.recognises(config):
            return each
    raise ConfigError(
        f"{path} is no looped model: expected model_type {' or '.join(types)} in its config.json, "
        f"got {config.get('model_type')!r}"
    )


def checkpoint_config(path: str | Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder or of the hub.

    Raises:
        ConfigError: there is none.
    """
    file = Path(path).expanduser() / "config.json"
    if file.exists():
        try:
            return read_json(file)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    from transformers import PretrainedConfig

    asks = _ASKS_HUB.get()
    try:
        return PretrainedConfig.get_config_dict(str(path), local_files_only=not asks)[0]
    except (OSError, ValueError) as error:
        if not asks:
            raise ConfigError(
                f"{path} is neither a folder here nor in the cache of the hub, which is not asked"
            ) from error
        raise ConfigError(not_loaded(path, error)) from error


@contextmanager
def hub_not_asked() -> Iterator[None]:
    """Have `checkpoint_config` read what is on this machine alone: folders, and the hub's cache."""
    before = _ASKS_HUB.set(False)
    try:
        yield
    finally:
        _ASKS_HUB.reset(before)


def require_sizes(path: str | Path, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Require these sizes of the `config.json` of a checkpoint.

    Raises:
        ConfigError: it does not.
    """
    if missing := [name for name in names if name not in config]:
        raise ConfigError(f"model.path {path}: no {', '.join(missing)} in config.json")


def loop_of(model: Any) -> Loop:
    """A causal language model in parts, by the `model_type` of its configuration.

    Raises:
        TypeError: it is of no family.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    for each in families().values():
        if each.causal_lm and each.model_type == kind:
            return each.loop(model)
    raise TypeError(f"model: expected a causal language model that loops, got {kind!r}")


def section_of(run: RunFolder) -> Any:
    """The section `model` of a run, of its family's dataclass.

    Raises:
        ConfigError: its configuration can't be read.
    """
    settings = run.settings()
    return tree.build(
        family_named(names_of(settings)[0]).section, settings.get("model", {}), "model"
    )
