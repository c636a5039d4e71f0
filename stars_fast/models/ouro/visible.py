"""Keys that each query sees, in the form that each kind of attention takes; made once a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.spans import Spans
from stars_fast.tokens import Tokens


@dataclass(frozen=True)
class Visible:
    """`Tokens.first_seen` in the forms that kernels take; made by `visible_keys`.

    Attributes:
        tokens: of the call.
        window: how many tokens a query sees at most, itself included; None for no bound.
        spans: intervals; None in the plain causal case (with a past, of one query only), and where
            they don't do, because of `holes`.
    """

    tokens: Tokens
    window: int | None = None
    spans: Spans | None = None
    _flex: Any = field(default=None, init=False, repr=False)

    @property
    def holes(self) -> bool:
        """Whether a row's real tokens have pads between them."""
        return self.tokens.real is not None and self.tokens.holes

    @cached_property
    def mask(self) -> Tensor | None:
        """[B or 1, 1, S, past + S] boolean, True to attend; None for the plain causal case."""
        plain = self.spans is None and not self.holes
        return None if plain else self.tokens.visible(self.window)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[n + 1] int32, the bounds of packed documents."""
        assert self.tokens.cu_seqlens is not None
        return self.tokens.cu_seqlens.int()

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest of packed documents, or a bound of it."""
        bound = self.tokens.longest
        return max(self.tokens.lengths) if bound is None else bound

    def flex_mask(self, queries: int, keys: int, device: torch.device) -> Any:
        """The same for FlexAttention, [B or 1, 1, queries, keys]; made once."""
        if self._flex is None:
            from torch.nn.attention.flex_attention import create_block_mask

            made = create_block_mask(*self._rule(), None, queries, keys, device=device)
            object.__setattr__(self, "_flex", made)
        return self._flex

    def _rule(self) -> tuple[Callable[..., Tensor], int | None]:
        """Whether a query sees a key, and B where that differs between rows."""
        past = self.tokens.past
        if self.spans is None and not self.holes:
            return lambda b, h, i, j: j <= i + past, None
        first = self.tokens.first_seen(self.window)
        if self.holes:
            real = self.tokens.real
            assert real is not None
            return (
                lambda b, h, i, j: (
                    (j >= first[b, i]) & (j <= i + past) & (real[b, j] | (j == i + past))
                ),
                len(first),
            )
        if len(first) == 1:
            row = first[0]
            return lambda b, h, i, j: (j >= row[i]) & (j <= i + past), None
        return lambda b, h, i, j: (j >= first[b, i]) & (j <= i + past), len(first)

    def on(self, device: torch.device) -> Visible:
        """The same on another device."""
        spans = self.spans
        if spans is not None:
            spans = replace(spans, queries=spans.queries.to(device), keys=spans.keys.to(device))
        return replace(self, tokens=self.tokens.to(device), spans=spans)

    def take_rows(self, rows: Tensor) -> Visible:
        """For some rows of the batch alone."""
        spans = self.spans
        if spans is not None and len(spans.queries) > 1:
            spans = replace(spans, queries=spans.queries[rows], keys=spans.keys[rows])
        return replace(self, tokens=self.tokens.take_rows(rows), spans=spans)


def visible_keys(tokens: Tokens, window: int | None) -> Visible:
    """The keys that each of the tokens sees within a window."""
    plain = tokens.is_causal(window) and (not tokens.past or tokens.length == 1)
    holes = tokens.real is not None and tokens.holes
    return Visible(tokens, window, None if plain or holes else Spans.of_tokens(tokens, window))
