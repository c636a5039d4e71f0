"""Work of the training steps that are compared: model sizes, documents and depths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from benchmarks import published
from stars_fast.data import IGNORE
from stars_fast.data.batches import Batches, MicroBatch
from stars_fast.data.documents import PackedChats
from stars_fast.models.depth import DepthLaw
from stars_fast.training.step.precision import parameter_dtype

MICROS = 4
"""Micro-batches of a step, each a row of packed documents."""

FIXED_TURNS = 4
"""Turns of the methods with a fixed number."""

LAW: dict[str, Any] = {"law": "lognormal", "mu": 1.7, "sigma": 0.4, "high": 16}
"""The paper's law of the number of turns, with a mean of 5.92."""


class ModelSize(NamedTuple):
    """Fields of an `OuroConfig`, and the most tokens of a row and of a document."""

    model: dict[str, Any]
    tokens: int


MODEL_SIZES = {
    "tiny": ModelSize(
        {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        512,
    ),
    "small": ModelSize(
        {
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
        512,
    ),
    "ouro": ModelSize({}, 2048),
}
"""tiny is the model of the recipe ouro-tiny, small one whose arithmetic outweighs Python on a CPU,
ouro is Ouro-1.4B."""


def random_model(fields: dict[str, Any], device: torch.device, precision: str) -> Any:
    """An Ouro of random weights, the same each time, in the parameters' dtype of the precision."""
    from stars_fast.models.ouro import OuroConfig, OuroForCausalLM

    torch.manual_seed(0)
    with device:
        model: Any = OuroForCausalLM(OuroConfig(**fields))
    return model.to(parameter_dtype(precision)).train()


class RandomChats:
    """Documents of random tokens, of log-normal length; three quarters of each are targets."""

    def __init__(self, count: int, longest: int, vocabulary: int) -> None:
        rng = np.random.default_rng(0)
        lengths = rng.lognormal(np.log(longest / 4), 0.6, count)
        self.lengths = lengths.clip(8, longest).astype(np.int64)
        self._tokens = [rng.integers(3, vocabulary, n).astype(np.int32) for n in self.lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._tokens[index]
        return tokens, np.arange(len(tokens)) >= len(tokens) // 4

    def fingerprint(self) -> int:
        return crc32(np.concatenate(self._tokens).tobytes())

    def largest_token(self) -> int:
        return max(int(tokens.max()) for tokens in self._tokens)


def packed_batches(tokens: int, vocabulary: int, device: torch.device) -> Batches:
    """Steps of `MICROS` micro-batches, each a row of at most so many tokens."""
    source = PackedChats(RandomChats(400, tokens, vocabulary), tokens, 0)
    return Batches(source, 0, MICROS, MICROS, device=device)


def one_by_one(window: Sequence[MicroBatch], turns: Sequence[int]) -> list[published.MicroBatch]:
    """The documents of packed rows as micro-batches of their own; each takes its row's turns."""
    found = []
    for batch, depth in zip(window, turns, strict=True):
        targets = torch.full_like(batch.tokens, IGNORE)
        targets.view(-1)[batch.positions] = batch.labels
        pairs = zip(
            batch.samples.per_sample(batch.tokens), batch.samples.per_sample(targets), strict=True
        )
        for tokens, labels in pairs:
            found.append(published.MicroBatch(_row(tokens), _row(labels), depth))
    return found


def _row(tokens: Tensor) -> Tensor:
    return tokens.clone().unsqueeze(0)


def balanced_depths(law: DepthLaw, steps: int, window: int) -> list[list[int]]:
    """The turns of `window` micro-batches in each of `steps`: quantiles of the law at even
    distances, so shifted that their mean is as close to the law's as it gets, and dealt out so that
    the steps have nearly the same sum."""
    count = steps * window

    def shifted(shift: float) -> list[int]:
        return [law.quantile((i + shift) / count) for i in range(count)]

    tried = [shifted((k + 0.5) / 100) for k in range(100)]
    depths = min(tried, key=lambda depths: abs(sum(depths) - count * law.mean()))
    dealt: list[list[int]] = [[] for _ in range(steps)]
    for depth in sorted(depths, reverse=True):
        min((step for step in dealt if len(step) < window), key=sum).append(depth)
    return dealt
