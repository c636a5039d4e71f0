"""The context that all layers of one call share: masks, positions, cache, injected input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stars_fast.models.looped_decoder.cache import LoopedDecoderCache
from stars_fast.tokens import Tokens


@dataclass(frozen=True)
class Context:
    """Attributes:
    tokens: of the call.
    prelude, block, coda: arguments of their layers, one mapping a layer.
    inputs: [B, S, D], the prelude's output, where turns read it.
    cache: keys and values of earlier tokens.
    rows: [n] int64, where a turn runs for some rows of the batch alone.
    """

    tokens: Tokens
    prelude: list[dict[str, Any]]
    block: list[dict[str, Any]]
    coda: list[dict[str, Any]]
    inputs: Tensor | None = None
    cache: LoopedDecoderCache | None = None
    rows: Tensor | None = None
