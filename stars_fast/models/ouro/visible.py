"""Which keys each query sees, for every kind of attention, worked out once a call.

Padding, packed documents, sliding windows and a cache are all one interval of keys a query
(`stars_fast.ops.spans.Spans`); a padding mask with holes is kept beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.spans import Spans


@dataclass(frozen=True)
class Visible:
    """Query i of row b sees keys [spans.queries[b, i, 0], spans.queries[b, i, 1]).

    Attributes:
        spans: None where every query sees all keys up to itself (the plain causal case; with a
            past, one query only).
        past: number of keys before the first query.
        window: how many tokens a query sees at most, itself included; None for no bound.
        padding: [B, past + S] boolean, True on real tokens; None where all are.
        holes: whether a row's real tokens have pads between them, so that intervals do not do.
        documents: bounds of packed documents, on the host and on the device, where given.
        restarts: documents are packed without known bounds, seen from their positions.
    """

    spans: Spans | None = None
    past: int = 0
    window: int | None = None
    padding: Tensor | None = None
    holes: bool = False
    documents: Documents | None = None
    restarts: bool = False
    _flex: Any = field(default=None, init=False, repr=False)

    @cached_property
    def mask(self) -> Tensor | None:
        """[B or 1, 1, S, past + S] boolean, True to attend; None for the plain causal case. A pad
        sees itself, so that no row of a softmax is empty."""
        if self.spans is None:
            return None
        queries = self.spans.queries.unsqueeze(1)
        key = torch.arange(self.spans.keys.shape[1], device=queries.device)
        seen = (key >= queries[..., :1]) & (key < queries[..., 1:])
        if self.holes:
            assert self.padding is not None
            seen = seen & self.padding[:, None, None, :]
        own = torch.arange(queries.shape[2], device=queries.device).unsqueeze(1) + self.past
        return seen | (key == own)

    def flex_mask(self, queries: int, keys: int, device: torch.device) -> Any:
        """The same for FlexAttention, [B or 1, 1, queries, keys]; made once. A pad sees nothing."""
        if self._flex is None:
            from torch.nn.attention.flex_attention import create_block_mask

            made = create_block_mask(*self._rule(), None, queries, keys, device=device)
            object.__setattr__(self, "_flex", made)
        return self._flex

    def _rule(self) -> tuple[Callable[..., Tensor], int | None]:
        """Of a query and a key, whether one sees the other; and the batch it is about."""
        if self.spans is None:
            past = self.past
            return lambda b, h, i, j: j <= i + past, None
        start, stop = self.spans.queries.unbind(-1)
        if len(start) == 1 and not self.holes:
            start, stop = start[0], stop[0]
            return lambda b, h, i, j: (j >= start[i]) & (j < stop[i]), None
        if not self.holes:
            return lambda b, h, i, j: (j >= start[b, i]) & (j < stop[b, i]), len(start)
        real = self.padding
        assert real is not None
        return lambda b, h, i, j: (j >= start[b, i]) & (j < stop[b, i]) & real[b, j], len(start)

    def on(self, device: torch.device) -> Visible:
        """The same on another device."""
        spans, padding, documents = self.spans, self.padding, self.documents
        return replace(
            self,
            spans=spans and Spans(spans.queries.to(device), spans.keys.to(device)),
            padding=None if padding is None else padding.to(device),
            documents=documents and replace(documents, cu=documents.cu.to(device)),
        )

    def take(self, rows: Tensor) -> Visible:
        """For some rows of the batch alone."""
        spans, padding = self.spans, self.padding
        if spans is not None and len(spans.queries) > 1:
            spans = Spans(spans.queries[rows], spans.keys[rows])
        return replace(self, spans=spans, padding=None if padding is None else padding[rows])


@dataclass(frozen=True)
class Documents:
    """Documents packed in one row.

    Attributes:
        cu: [n + 1] int32 on the device.
        bounds: the same on the host.
    """

    cu: Tensor
    bounds: list[int] = field(repr=False)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(b - a for a, b in pairwise(self.bounds))


def causal_visible(length: int, past: int, window: int | None, device: torch.device) -> Visible:
    """All tokens are real."""
    bounded = window is not None and window < past + length
    if not bounded and (not past or length == 1):
        return Visible(past=past)
    stop = past + torch.arange(1, length + 1, device=device)
    start = torch.zeros_like(stop) if window is None else (stop - window).clamp_min(0)
    return Visible(_spans(start[None], stop[None], past + length), past, window)


def padded_visible(padding: Tensor, holes: bool, past: int, window: int | None) -> Visible:
    """Of rows with pads.

    Args:
        padding: [B, past + S] boolean, True on real tokens.
    """
    keys = padding.shape[1]
    first = padding.to(torch.uint8).argmax(1, keepdim=True)
    last = keys - padding.flip(1).to(torch.uint8).argmax(1, keepdim=True)
    last = torch.where(padding.any(1, keepdim=True), last, first)
    after = torch.arange(past + 1, keys + 1, device=padding.device)  # of each query
    stop = torch.minimum(after, last)
    start = first.expand_as(stop)
    if window is not None:
        start = torch.maximum(start, after - window)
    return Visible(_spans(start, torch.maximum(stop, start), keys), past, window, padding, holes)


def packed_visible(
    starts: Tensor, window: int | None, documents: Documents | None = None
) -> Visible:
    """Of packed documents.

    Args:
        starts: [B or 1, S] int64, the place where the document of each token starts.
    """
    length = starts.shape[1]
    stop = torch.arange(1, length + 1, device=starts.device).expand_as(starts)
    start = starts if window is None else torch.maximum(starts, stop - window)
    spans = _spans(start, stop, length)
    return Visible(spans, window=window, documents=documents, restarts=documents is None)


def _spans(start: Tensor, stop: Tensor, keys: int) -> Spans:
    """Of start and stop [B, S], both rising with the query: the queries that see key j are those
    between the first whose stop is above j and the last whose start is not."""
    start, stop = start.contiguous(), stop.contiguous()
    key = torch.arange(keys, device=start.device).expand(len(start), keys).contiguous()
    # Queries that see nothing must not spoil the order: their interval is empty at its place.
    first = torch.searchsorted(stop.cummax(1).values, key, right=True)
    last = torch.searchsorted(start.cummax(1).values, key, right=True)
    last = torch.maximum(last, first)
    pack = [torch.stack(pair, -1).to(torch.int32) for pair in ((start, stop), (first, last))]
    return Spans(*pack)
