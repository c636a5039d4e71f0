"""The rows of a step as the plan takes them: how long, how many in all, how much of them counts."""

from __future__ import annotations

from typing import Any, NamedTuple

from stars_fast.data.kinds import kind_named

FULL = 0.97
"""Part of packed rows that is not padding (`stars-fast train` says it of your data)."""

SUPERVISED = 0.75
"""Part of the tokens of a chat that is a target, as in `benchmarks.workload`."""


DOCUMENT = 600
"""Mean tokens of a document, where nothing says how long they are."""


class Rows(NamedTuple):
    """Rows that a step has `batch_size` of.

    Attributes:
        lengths: of the documents of a row, all alike.
        units: rows of an epoch; None where the recipe does not say.
        supervised: part of the tokens that are targets.
        packed: whether several documents share a row.
    """

    lengths: list[float]
    units: float | None
    supervised: float
    packed: bool

    @property
    def tokens(self) -> float:
        """Tokens of a row, without pads."""
        return sum(self.lengths)


def rows_of(data: Any, document: int) -> Rows:
    """The rows of a section `data`; `document` is the mean length of a document in tokens, where
    the section does not say it."""
    kind = kind_named(data.kind)
    if alike := kind.sample(data):
        tokens, targets = alike
        return Rows([float(tokens)], data.train_samples, targets / tokens, False)
    if not hasattr(data, "samples"):
        return Rows([float(kind.longest(data))], None, 1.0, False)
    mean = float(min(document, kind.longest(data)))
    supervised = 1.0 if data.supervise == "all" else SUPERVISED
    units = data.samples  # what is held out comes on top
    if not kind.packs(data):
        return Rows([mean], units, supervised, False)
    row = FULL * (data.row_length or data.max_length)
    whole, rest = divmod(row, mean)
    lengths = [mean] * int(whole) + ([rest] if rest else [])
    return Rows(lengths, None if units is None else units * mean / row, supervised, True)
