"""Sizes of a looped model, by which its work and its memory are counted without making it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Sizes of a looped transformer.

    Attributes:
        width: of the state, D.
        queries, keys: width of all heads of queries, and of those of keys (as of values).
        heads: of queries.
        inner: width of the MLP.
        gated: whether the MLP has a gate, a third matrix.
        layers: of the block.
        outside: layers of prelude and coda together, alike those of the block.
        vocabulary: rows of the head, and of the embedding.
        tied: whether those are one.
        injection: weights of a linear map that each turn begins with.
        native: whether the layers are ours, with fused norms and gates.
    """

    width: int
    queries: int
    keys: int
    heads: int
    inner: int
    gated: bool
    layers: int
    outside: int
    vocabulary: int
    tied: bool = False
    injection: int = 0
    native: bool = True

    @property
    def layer_weights(self) -> int:
        """Weights of the linear maps of a layer."""
        mlp = (3 if self.gated else 2) * self.inner
        return self.width * (2 * self.queries + 2 * self.keys + mlp)

    @property
    def block_weights(self) -> int:
        """Weights of the linear maps of a turn."""
        return self.layers * self.layer_weights + self.injection

    @property
    def head_weights(self) -> int:
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """Parameters of all linear maps, the head and the embedding; norms are left out."""
        tables = self.head_weights * (1 if self.tied else 2)
        return self.block_weights + self.outside * self.layer_weights + tables

    def outside_block(self, supervised: float) -> float:
        """As `Loop.outside_block`: the cost of all that lies outside the block, in turns."""
        outside = self.outside * self.layer_weights + supervised * self.head_weights
        return outside / self.block_weights


DECODER_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""Fields of a `config.json` that the shape of a decoder is made of."""


def shape_of_config(
    config: Mapping[str, Any], layers: int, outside: int, **others: object
) -> Shape:
    """The shape of a decoder with this `config.json`, of so many layers in the block and outside
    it; `others` are fields of `Shape`."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    fields = {"gated": True, "tied": bool(config.get("tie_word_embeddings", False))}
    return Shape(
        width=width,
        queries=heads * head,
        keys=(config.get("num_key_value_heads") or heads) * head,
        heads=heads,
        inner=config["intermediate_size"],
        layers=layers,
        outside=outside,
        vocabulary=config["vocab_size"],
        **fields | others,  # type: ignore[arg-type]
    )
