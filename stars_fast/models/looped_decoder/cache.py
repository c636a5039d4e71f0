"""The key-value cache of a looped decoder: a slot for each layer of prelude and coda, and for each
layer of each turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stars_fast.models.ouro.cache import OuroCache


class LoopedDecoderCache(OuroCache):
    """Slots of prelude and coda first, then `turns` times those of the block.

    Args:
        layers: of the block.
        outside: layers of prelude and coda together.
        turns: turns of the calls that use the cache; set by the first of them if None.
    """

    def __init__(self, layers: int, outside: int, turns: int | None = None) -> None:
        super().__init__(layers, turns)
        self.outside = outside

    def slot(self, turn: int, layer: int) -> int:
        return self.outside + super().slot(turn, layer)


class LayerSlots:
    """The cache as layers of transformers see it in one turn, or outside the turns.

    Args:
        cache: of the call.
        layers: by their place in the decoder, which they tell `update`.
        first: slot of the first of them, outside the turns; None in a turn.
        turn: its index.
        rows: [n] int64, where the turn runs for some rows of the batch alone.
    """

    def __init__(
        self,
        cache: LoopedDecoderCache,
        layers: Sequence[int],
        first: int | None = None,
        turn: int = 0,
        rows: Tensor | None = None,
    ) -> None:
        self.cache, self.first, self.turn, self.rows = cache, first, turn, rows
        self.place = {layer: i for i, layer in enumerate(layers)}

    def update(
        self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values [B, Hkv, S, D] of a layer, and return all of them,
        [B, Hkv, past + S, D]."""
        place = self.place[layer_idx]
        if self.first is None:
            return self.cache.append(k, v, self.turn, place, self.rows)
        keys, values = self.cache.update(k, v, self.first + place)
        return keys, values
