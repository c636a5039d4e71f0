"""The paper's addition task: n-digit sums as token sequences, the answer's digits reversed.

A sample is `a + b =`, the digits of the answer from the lowest to the highest, and an end token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORE = -100


class Batch(NamedTuple):
    """tokens [B, S] int64; targets [B, S] int64, -100 where no loss; mask [B, S] bool."""

    tokens: Tensor
    targets: Tensor
    mask: Tensor


@dataclass
class AdditionConfig:
    digits: int = 4
    train_samples: int = 100_000
    test_samples: int = 1_000
    seed: int = 0
    train_file: str | None = None
    test_file: str | None = None


class AdditionTokenizer:
    """Digits 0..9 are themselves, then `+`, `=`, end and pad."""

    plus_id, equals_id, end_id, pad_id = 10, 11, 12, 13
    vocab_size = 14


class AdditionData:
    """Encoded train and test sums."""

    def __init__(self, config: AdditionConfig) -> None:
        self.config = config
        self.tokenizer = AdditionTokenizer()
        n = config.digits
        rng = np.random.default_rng(config.seed)
        low, count = 10 ** (n - 1), 9 * 10 ** (n - 1)
        want = config.train_samples + config.test_samples
        index = rng.choice(count * count, want, replace=False)
        pairs = np.stack([low + index // count, low + index % count], axis=1)
        self.test = self._encode(pairs[: config.test_samples])
        self.train = self._encode(pairs[config.test_samples :])
        self.max_length = 3 * n + 3

    def _encode(self, pairs: np.ndarray) -> Tensor:
        n = self.config.digits
        t = self.tokenizer
        powers = 10 ** np.arange(n + 1)
        a, b = pairs[:, :1], pairs[:, 1:]
        answer = (a + b) // powers % 10
        long = (a + b)[:, 0] >= 10**n
        answer[~long, n] = t.end_id
        full = np.full((len(pairs), 1), 0)
        seq = np.concatenate(
            [
                a // powers[:n][::-1] % 10,
                full + t.plus_id,
                b // powers[:n][::-1] % 10,
                full + t.equals_id,
                answer,
                np.where(long[:, None], t.end_id, t.pad_id),
            ],
            axis=1,
        )
        return torch.from_numpy(seq)

    def batch(self, split: str, indices: Tensor) -> Batch:
        seq = getattr(self, split)[indices]
        tokens, targets = seq[:, :-1], seq[:, 1:].clone()
        targets[:, : 2 * self.config.digits + 1] = IGNORE
        targets[targets == self.tokenizer.pad_id] = IGNORE
        return Batch(tokens, targets, tokens != self.tokenizer.pad_id)


def batch_indices(seed: int, step: int, batch_size: int, n: int) -> Tensor:
    """Indices of batch `step` [batch_size] int64: each epoch a seeded permutation of 0..n-1."""
    start = step * batch_size
    parts = []
    while batch_size > 0:
        epoch, offset = divmod(start, n)
        take = min(batch_size, n - offset)
        rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        parts.append(rng.permutation(n)[offset : offset + take])
        start, batch_size = start + take, batch_size - take
    return torch.from_numpy(np.concatenate(parts))
