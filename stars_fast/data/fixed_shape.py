"""Micro-batches of one shape: rows filled up to a fixed length, documents to a fixed number.

    packed    | doc | doc | doc | pads | pads |   cu_seqlens [documents + 1], empty ones at the end
    rows      | sample | pads |                   real [rows, length]

Pads are samples of nothing: no loss, no direction, no weight. Loss and gradient are those of the
batch as it was, but for the order of sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.data import IGNORE
from stars_fast.data.batches import HostBatch, Source
from stars_fast.tokens import Tokens


class FixedShape(NamedTuple):
    """The shape of every micro-batch.

    rows, length: of its tokens; packed documents are one row.
    longest: tokens that no document exceeds, those of pads included.
    documents: how many there are, those of pads and empty ones included; None where a sample is a
        row.
    """

    rows: int
    length: int
    longest: int
    documents: int | None

    def fill(self, host: HostBatch) -> HostBatch:
        """A batch that fits, filled up with pads.

        Raises:
            ValueError: it does not fit.
        """
        rows, length = host.tokens.shape
        room = self.length - length
        if rows != self.rows or room < 0:
            raise ValueError(
                f"tokens: expected [{self.rows}, {self.length}] at most, got {[rows, length]}"
            )
        samples = host.samples
        real = torch.ones(rows, length, dtype=torch.bool) if samples.real is None else samples.real
        bounds = None
        if self.documents is not None:
            assert samples.cu_seqlens is not None
            bounds = self._bounds(samples.cu_seqlens)
        return HostBatch(
            F.pad(host.tokens, (0, room)),
            F.pad(host.targets, (0, room), value=IGNORE),
            replace(
                samples,
                length=self.length,
                real=F.pad(real, (0, room)),
                cu_seqlens=bounds,
                longest=None if bounds is None else self.longest,
                holes=False,
            ),
        )

    def _bounds(self, given: Tensor) -> Tensor:
        """The bounds of the documents, then of pads, as long as a document may be, then of empty
        documents."""
        assert self.documents is not None
        end = int(given[-1])
        pads = torch.tensor(range(end + self.longest, self.length, self.longest), dtype=given.dtype)
        empty = self.documents + 1 - len(given) - len(pads)
        if empty < 1:
            raise ValueError(
                f"cu_seqlens: expected at most {self.documents} documents with those of pads, got "
                f"{self.documents + 1 - empty}"
            )
        return torch.cat([given, pads, torch.full((empty,), self.length)])

    def tokens(self, device: torch.device) -> Tokens:
        """The samples of a micro-batch whose tensors are still to be written: what the host knows
        of all of them alike."""
        bounds = None
        if self.documents is not None:
            bounds = torch.zeros(self.documents + 1, dtype=torch.int64, device=device)
        return Tokens(
            self.rows,
            self.length,
            real=torch.ones(self.rows, self.length, dtype=torch.bool, device=device),
            cu_seqlens=bounds,
            holes=False,
            longest=None if bounds is None else self.longest,
            device=device,
        )


def fixed_shape(source: Source, rows: int, packed: bool) -> FixedShape:
    """The shape into which every micro-batch of `rows` units of a source fits."""
    longest = source.longest
    if not packed:
        return FixedShape(rows, longest, longest, None)
    most = int(source.count(np.arange(len(source))).max())  # a unit may come twice, of few
    return FixedShape(1, rows * longest, longest, rows * (most + 1))
