"""The parts of a model's weights that a run trains, as `train.freeze` and `lora` leave them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from stars_fast.base.errors import ConfigError
from stars_fast.models.families import family_named
from stars_fast.models.freeze import freeze
from stars_fast.models.shape import Shape


class Trained(NamedTuple):
    """Fractions of the weights of linear maps that get a gradient, and the adapters beside them.

    block, outside, head, embedding: of the block's layers, of those outside, and of the tables. A
    tied head is the embedding. rank: of LoRA's adapters on each map of the block, 0 without.
    """

    block: float = 1.0
    outside: float = 1.0
    head: float = 1.0
    embedding: float = 1.0
    rank: int = 0

    @property
    def reaches_turns(self) -> bool:
        """Whether a gradient goes back through the turns: to them, or to what comes before."""
        return self.rank > 0 or self.block > 0 or self.outside > 0 or self.embedding > 0

    def parameters(self, shape: Shape) -> int:
        """The parameters that the optimiser moves."""
        d, q, k, f = shape.width, shape.queries, shape.keys, shape.inner
        layer = 2 * (d + q) + 2 * (d + k) + (3 if shape.gated else 2) * (d + f)
        number = self.block * shape.block_weights
        number += self.outside * shape.outside * shape.layer_weights
        number += self.embedding * shape.head_weights
        number += 0 if shape.tied else self.head * shape.head_weights
        return round(number) + self.rank * shape.layers * layer


def trained_of(config: Any) -> Trained:
    """The parts that a `RunConfig` trains. Of a family that has no skeleton all weights count as
    trained.

    Raises:
        ConfigError: `train.freeze` names no part of the model, or leaves nothing to train; the
            settings make no model.
    """
    if config.lora.wanted:
        return Trained(0.0, 0.0, 0.0, 0.0, config.lora.rank)
    if not config.train.freeze:
        return Trained()
    key = repr(config.model), tuple(config.train.freeze)
    if key not in _known:
        _known[key] = _left(config)
    return _known[key]


_known: dict[tuple[str, tuple[str, ...]], Trained] = {}


def _left(config: Any) -> Trained:
    """The parts that `train.freeze` leaves to train, by names and sizes of a skeleton."""
    family = family_named(config.model.family)
    try:
        model = family.skeleton(config.model)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # settings that make no model
        raise ConfigError(f"model: {error}") from error
    if model is None:
        return Trained()
    freeze(model, config.train.freeze)
    tables = [_table(model, name) for name in ("get_output_embeddings", "get_input_embeddings")]
    head, embedding = (_matrices([table]) for table in tables)
    block = _matrices(family.loop(model).turn_modules)
    inside = head.keys() | embedding.keys() | block.keys()
    outside = [p for key, p in _matrices([model]).items() if key not in inside]
    return Trained(
        block=_fraction(block.values()),
        outside=_fraction(outside),
        head=_fraction(head.values()),
        embedding=_fraction(embedding.values()),
    )


def _table(model: Any, name: str) -> nn.Module:
    """The head or embedding, by transformers' name of it; the one table of a `LoopedLM`."""
    return getattr(model, name)() if hasattr(model, name) else model.tokens


def _matrices(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    return {id(p): p for each in modules for p in each.parameters() if p.dim() >= 2}


def _fraction(parameters: Iterable[nn.Parameter]) -> float:
    """The part of the weights that wants a gradient; 1 where there are none."""
    sizes = [(p.numel(), p.requires_grad) for p in parameters]
    whole = sum(size for size, _ in sizes)
    return sum(size for size, wants in sizes if wants) / whole if whole else 1.0
