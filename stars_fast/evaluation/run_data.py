"""The data of a run, opened again for its model."""

from __future__ import annotations

from typing import Any

from stars_fast.base import tree
from stars_fast.base.choices import names_of
from stars_fast.base.errors import ConfigError
from stars_fast.data.kinds import DataKind, OpenData, kind_named
from stars_fast.models.saved import ModelSource, load_tokenizer


def data_of(source: ModelSource) -> tuple[DataKind, Any]:
    """The kind of the data of a run, and its section `data`.

    Raises:
        ConfigError: the configuration can't be read.
    """
    settings = source.run.settings()
    kind = kind_named(names_of(settings)[1])
    return kind, tree.build(kind.section, settings.get("data", {}), "data")


def open_data(source: ModelSource) -> OpenData:
    """The data of a run.

    Raises:
        ConfigError: they are no longer there.
    """
    kind, section = data_of(source)
    tokenizer = None
    if kind.own_tokens is None or (source.run.model / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(source)
    try:
        return kind.open(section, tokenizer, int(source.run.settings().get("seed", 0)))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{source.path}: {error}") from error
