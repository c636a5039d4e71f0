"""Kinds of training data: one file of this folder each, which defines `KIND`.

A kind knows its `data` section of a recipe, and opens it: a source of batches to train on, and what
is held out. It knows no model; what it needs of one is the tokenizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar

from stars_fast.base.errors import ConfigError
from stars_fast.data.batches import Source


@dataclass(frozen=True)
class OpenData:
    """Data as a run takes them.

    source: to train on. held_out: to judge on, rows padded on the right; None for nothing.
    unit: name of a sample, in the plural. notes: lines for people. further: other data to judge on,
        by name, where answers are right or wrong as a whole.
    """

    source: Source
    held_out: Source | None
    unit: str
    notes: tuple[str, ...] = field(default=())
    further: Mapping[str, Source] = field(default_factory=dict)


class DataKind(ABC):
    """A kind of data.

    Attributes:
        section: the dataclass of a recipe's section `data`; its field `kind` is the name of the
            file.
        exact_match: whether an answer is right or wrong as a whole; else its loss is what counts.
        own_tokens: token ids of data that bring their own; None where the model's tokenizer makes
            them.
    """

    section: ClassVar[type]
    exact_match: ClassVar[bool] = False
    own_tokens: ClassVar[int | None] = None

    @property
    def name(self) -> str:
        """That of its file, by which recipes know it."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def longest(self, section: Any) -> int:
        """Most tokens of a sample."""

    def sample(self, section: Any) -> tuple[int, int] | None:
        """Tokens of a training sample and targets among them, where all samples are alike."""
        return None

    def packs(self, section: Any) -> bool:
        """Whether samples follow each other in one row."""
        return False

    def unread(self, section: Any) -> dict[str, str]:
        """Fields of a section that are not read, the others being what they are, and why."""
        return {}

    @abstractmethod
    def open(self, section: Any, tokenizer: Any, seed: int, quiet: bool = True) -> OpenData:
        """The data of a run.

        Args:
            section: of `DataKind.section`.
            tokenizer: of transformers, the model's; None for a model without one.
            seed: of the run.
            quiet: without a progress bar.

        Raises:
            ValueError, OSError: there are none, or not for this tokenizer.
        """


@cache
def kinds() -> dict[str, DataKind]:
    """Every kind by name."""
    names = sorted(module.name for module in iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}").KIND for name in names}


def kind_named(name: str) -> DataKind:
    """The kind of a recipe's `data.kind`.

    Raises:
        ConfigError: there is none.
    """
    if name not in kinds():
        raise ConfigError(f"data.kind: expected one of {', '.join(kinds())}, got {name!r}")
    return kinds()[name]
