"""Memory of keys and values, read from the cache that a model makes.

A looped model keeps keys and values for each layer of each turn: its cache grows with the turns,
which the weights do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyValues:
    """Bytes of the cache of one sequence.

    token: for a further token. context: for `length` tokens. length: the context's.
    """

    token: int
    context: int
    length: int


@torch.no_grad()
def key_values(model: Any, length: int) -> KeyValues | None:
    """The cache of a causal language model of transformers at its depth, from passes over one and
    two tokens. A layer with a sliding window keeps one token less than the window; what does not
    grow, as the state of a recurrence, counts for every length.

    Args:
        model: with the turns in its configuration, if it has turns.
        length: tokens of the context.

    Returns:
        None for a model whose cache has no layers to look at.
    """
    first, second = (_layers(model, tokens) for tokens in (1, 2))
    if not first or len(first) != len(second):
        return None
    token = context = 0
    for (bytes_of_one, window), (bytes_of_two, _) in zip(first, second, strict=True):
        grown = bytes_of_two - bytes_of_one
        held = length if window is None else min(length, window - 1)
        token += grown
        context += bytes_of_one + (held - 1) * grown
    return KeyValues(token, context, length)


def _layers(model: Any, tokens: int) -> list[tuple[int, int | None]]:
    """Bytes and window of each slot of the cache after a pass over so many tokens."""
    from stars_fast.models.ouro.cache import CACHE

    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    cache = model(input_ids=ids, use_cache=True).get(CACHE)
    return [
        (
            sum(tensor.nbytes for tensor in _tensors(vars(layer)) if tensor.dim() > 1),
            layer.sliding_window if getattr(layer, "is_sliding", False) else None,
        )
        for layer in getattr(cache, "layers", ())
    ]


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, (dict, list, tuple)):
        for each in held.values() if isinstance(held, dict) else held:
            yield from _tensors(each)
