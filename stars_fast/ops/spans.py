"""Which keys a query sees, as one interval a query: what the attention kernels understand.

Causal and full attention, packed documents, left and right padding and sliding windows are all of
this form. Query i sees keys [queries[b, i, 0], queries[b, i, 1]); `keys` is the same seen from the
other side, the queries that see key j.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stars_fast.base.capturing import capturing
from stars_fast.tokens import Tokens

# Spans of the boolean masks met in the dual pass that runs: a model hands one mask to each of its
# layers, cut anew. Each entry holds its mask, so that no other can take its place in memory.
_known: ContextVar[dict[Any, tuple[Tensor, Spans | None]] | None] = ContextVar(
    "known", default=None
)
_unasked: ContextVar[bool] = ContextVar("unasked", default=False)


@contextmanager
def no_questions_of_masks() -> Iterator[None]:
    """Inside, no boolean mask and no spans are looked at: that would make the host wait for the
    device, which a CUDA graph can't capture."""
    token = _unasked.set(True)
    try:
        yield
    finally:
        _unasked.reset(token)


def is_unasked() -> bool:
    """Whether this is inside of `no_questions_of_masks`, or what runs is being captured."""
    return _unasked.get() or capturing()


@contextmanager
def masks_of_one_pass() -> Iterator[None]:
    """Inside, the spans of a mask are worked out once."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


@dataclass(frozen=True)
class Spans:
    """Intervals of keys and of queries.

    Attributes:
        queries: int32 [B or 1, Sq, 2]: first key of each query, and the one after its last.
        keys: int32 [B or 1, Sk, 2]: first query that sees each key, and the one after the last.
        exact: whether every query of such an interval sees the key; else some may not.
    """

    queries: Tensor
    keys: Tensor
    exact: bool = False

    @classmethod
    def of_documents(
        cls, cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, causal: bool
    ) -> Spans:
        """Documents packed in a row: query i of a document sees its keys (the first i + 1 of them
        if causal).

        Args:
            cu_q, cu_k: [n + 1] integers, rising from 0 to `total_q` and `total_k`.
        """
        from_queries = _other_side(cu_q, cu_k, total_q)
        from_keys = _other_side(cu_k, cu_q, total_k)
        if causal:
            start, stop, place = from_queries
            from_queries = start, torch.minimum(stop, start + place + 1), place
            start, stop, place = from_keys
            from_keys = torch.minimum(start + place, stop), stop, place
        return cls(_pack(from_queries), _pack(from_keys), True)

    @classmethod
    def of_tokens(cls, tokens: Tokens, window: int | None = None) -> Spans:
        """Tokens that see what `Tokens.first_seen` says, of a batch without holes."""
        start = tokens.first_seen(window).contiguous()
        queries, keys = tokens.length, tokens.past + tokens.length
        stop = torch.arange(tokens.past + 1, keys + 1, device=start.device).expand_as(start)
        key = torch.arange(keys, device=start.device).expand(len(start), keys).contiguous()
        # Both rise with the query: a key is seen from its own place on, until a start is beyond it.
        first = (key - tokens.past).clamp(0, queries)
        last = torch.maximum(torch.searchsorted(start, key, right=True), first)
        sides = (start, stop), (first, last)
        seen, seeing = (torch.stack(pair, -1).to(torch.int32) for pair in sides)
        return cls(seen, seeing, True)

    @classmethod
    def of_mask(cls, mask: Tensor) -> Spans | None:
        """The spans of a boolean mask [B or 1, 1, Sq, Sk], True to attend; None where keys have
        gaps. Asked once for each mask of a dual pass."""
        if is_unasked():
            return None
        known = _known.get()
        if known is None or mask.is_inference():
            return cls._of_mask(mask[:, 0])
        owner = mask if mask._base is None else mask._base
        key = id(owner), mask._version, mask.storage_offset(), mask.shape, mask.stride()
        if key not in known:
            known[key] = owner, cls._of_mask(mask[:, 0])
        return known[key][1]

    def causal(self) -> Spans:
        """The same, less the keys that come after their query."""
        return Spans(_cut(self.queries, 1), _cut(self.keys, 0), self.exact)

    @classmethod
    def _of_mask(cls, mask: Tensor) -> Spans | None:
        queries, contiguous = _hull(mask)
        keys, exact = _hull(mask.mT)
        found, known = torch.stack((contiguous, exact)).tolist()  # one wait for the device
        return cls(queries, keys, known) if found else None


def _other_side(cu: Tensor, other: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each token: start and stop of its document on the other side, and its place in it."""
    tokens = Tokens(1, total, cu_seqlens=cu, device=cu.device)
    document = tokens.owner
    assert document is not None
    return other[document], other[document + 1], tokens.positions[0]


def _pack(parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return torch.stack(parts[:2], -1).to(torch.int32).unsqueeze(0)


def _hull(mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B, n, 2]: the interval from the first to the last True of each row, and whether every row
    is full between them."""
    size = mask.shape[-1]
    if size == 0:
        empty = mask.new_zeros((*mask.shape[:-1], 2), dtype=torch.int32)
        return empty, mask.new_ones(())
    count = mask.sum(-1)
    first = mask.to(torch.uint8).argmax(-1)
    last = size - mask.flip(-1).to(torch.uint8).argmax(-1)
    last = torch.where(count > 0, last, first)
    return torch.stack((first, last), -1).to(torch.int32), (count == last - first).all()


def _cut(spans: Tensor, side: int) -> Tensor:
    """Stops of queries bounded by their own place + 1, or starts of keys by their own place."""
    start, stop = spans.unbind(-1)
    place = torch.arange(spans.shape[1], dtype=torch.int32, device=spans.device)
    if side == 1:
        stop = torch.maximum(torch.minimum(stop, place + 1), start)
    else:
        start = torch.minimum(torch.maximum(start, place), stop)
    return torch.stack((start, stop), -1)


def causal_spans(length: int, keys: int, device: Any) -> Tensor:
    """[1, length, 2]: query i sees keys j <= i."""
    stop = torch.arange(1, length + 1, dtype=torch.int32, device=device).clamp_max_(keys)
    return torch.stack((torch.zeros_like(stop), stop), -1).unsqueeze(0)


def full_spans(length: int, keys: int, device: Any) -> Tensor:
    """[1, length, 2]: every query sees every key."""
    stop = torch.full((length,), keys, dtype=torch.int32, device=device)
    return torch.stack((torch.zeros_like(stop), stop), -1).unsqueeze(0)
