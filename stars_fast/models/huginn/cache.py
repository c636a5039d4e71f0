"""The key-value cache of Huginn: a slot for each layer of prelude and coda, and for each layer of
each turn of the core."""

from __future__ import annotations

from stars_fast.models.ouro.cache import OuroCache


class HuginnCache(OuroCache):
    """Slots of keys and values, in the order in which a call fills them.

    Args:
        prelude: its layers.
        core: layers of a turn.
        turns: of the calls that use the cache; set by the first of them if None.
    """

    def __init__(self, prelude: int, core: int, turns: int | None = None) -> None:
        super().__init__(core, turns)
        self.outside = prelude

    def slot(self, turn: int, layer: int) -> int:
        """The slot of a layer: `layer` counts on from the core into the coda, and back from it into
        the prelude, whose last layer is -1; `turn` matters in the core alone."""
        if layer < 0:
            return self.outside + layer
        if layer >= self.turn_layers:
            assert self.turns is not None
            turn = self.turns - 1
        return self.outside + turn * self.turn_layers + layer
