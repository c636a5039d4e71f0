"""The key-value cache of a looped model: a slot for each layer of each turn."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

# What this version of transformers calls a model's cache: `past_key_values`, later `cache`.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(create_causal_mask).parameters
)


class OuroCache(DynamicCache):
    """`turns` x `layers` slots of keys and values; slot `turn * layers + layer`.

    Cropping, reordering (beam search) and repeating are those of transformers' `DynamicCache`.

    Args:
        layers: layers of the shared block.
        turns: turns of the calls that use the cache; set by the first of them if None.
    """

    outside = 0  # slots of layers before the turns, in subclasses

    def __init__(self, layers: int, turns: int | None = None) -> None:
        super().__init__()
        self.turn_layers = layers
        self.turns = turns

    def bind(self, layers: int, turns: int, batch: int, outside: int = 0) -> None:
        """Take part in a call of so many `layers` a turn, and `outside` of the turns.

        Raises:
            ValueError: the cache is for another number of layers or turns, or holds another batch.
        """
        if layers != self.turn_layers:
            raise ValueError(
                f"past_key_values: expected a cache for {layers} layers, got {self.turn_layers}"
            )
        if outside != self.outside:
            raise ValueError(
                f"past_key_values: expected a cache for {outside} layers outside of the turns, got "
                f"{self.outside}"
            )
        if self.turns not in (None, turns):
            raise ValueError(
                f"turns: this cache holds {self.get_seq_length()} tokens at {self.turns} turns and "
                f"can't go on with {turns}; start with an empty cache"
            )
        held: Any = self.layers[0] if self.layers else None
        if self.get_seq_length() and held.keys.shape[0] != batch:
            raise ValueError(
                f"past_key_values: expected a cache of {batch} rows, got {held.keys.shape[0]}"
            )
        self.turns = turns

    def reset(self) -> None:
        """Forget all tokens, and the number of turns."""
        self.layers.clear()
        self.turns = None

    def slot(self, turn: int, layer: int) -> int:
        """The slot of a layer in a turn."""
        return turn * self.turn_layers + layer

    def append(
        self, k: Tensor, v: Tensor, turn: int, layer: int, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, and return all of the slot's.

        Args:
            k, v: [B, Hkv, S, D].
            rows: [n] int64, where the turn runs for some of the batch alone: k and v are theirs,
                [n, Hkv, S, D]. The others keep those of the turn before.

        Returns:
            Keys and values [B (or n), Hkv, past + S, D].
        """
        if rows is not None:
            last = self._last(turn - 1, layer, k.shape[-2])
            k, v = (old.index_copy(0, rows, new) for old, new in zip(last, (k, v), strict=True))
        keys, values = self.update(k, v, self.slot(turn, layer))
        return (keys, values) if rows is None else (keys[rows], values[rows])

    def repeat_from(self, turn: int, length: int) -> None:
        """No sequence takes turn `turn` or a later one: they keep the keys and values of the turn
        before, for the last `length` tokens."""
        assert self.turns is not None
        for later in range(turn, self.turns):
            for layer in range(self.turn_layers):
                last = self._last(turn - 1, layer, length)
                self.update(*last, self.slot(later, layer))

    def _last(self, turn: int, layer: int, length: int) -> tuple[Tensor, Tensor]:
        slot: Any = self.layers[self.slot(turn, layer)]
        return slot.keys[..., -length:, :], slot.values[..., -length:, :]


def given_cache(past_key_values: Any, cache: Any, kind: type[OuroCache]) -> Any:
    """The cache that a call is given by either name; None without.

    Raises:
        TypeError: it is not one with the slots of `kind`.
        ValueError: two are given.
    """
    if None not in (past_key_values, cache) and past_key_values is not cache:
        raise ValueError("cache: expected None when past_key_values is given, got both")
    given = past_key_values if cache is None else cache
    if given is not None and getattr(type(given), "slot", None) is not kind.slot:
        article = "an" if kind is OuroCache else "a"
        raise TypeError(
            f"past_key_values: expected {article} {kind.__name__}, which has a slot for each layer "
            f"of each turn, got {type(given).__name__}"
        )
    return given
