"""Strings of bits and the parity of each beginning: a task whose depth grows with its length.

    tokens    = 1 0 1 1 0
    parities    1 1 0 1 1     the sum of the bits up to here, modulo 2

`=` begins a string: without it or positions a first 1 could not be told from one after another.
Every place is predicted from the bits up to it, and a string counts if all of them are right. The
state that carries the answer from place to place is one bit, but it takes as many steps as the
string is long: train on short strings, judge on longer ones with more turns. It is the prefix-sum
task of Schwarzschild et al. 2021 (arXiv 2106.04537) for a causal model.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from stars_fast.base.checks import check_integer
from stars_fast.data import IGNORE
from stars_fast.data.batches import HostBatch
from stars_fast.tokens import Tokens

ALPHABET = "01="
MAX_BITS = 60
"""Most bits of a training string, whose strings are drawn as numbers."""


@dataclass
class ParityConfig:
    """Strings of bits to train on, and unseen ones to judge on.

    bits: of a training string.
    longer: lengths that are judged too, in multiples of bits.
    train_samples: training strings.
    test_samples: unseen strings of each length.
    seed: of the strings (not of the batch order).

    Raises:
        ValueError: it names the first field that is out of range, or if more strings are asked for
            than there are.
    """

    bits: int = 10
    longer: tuple[int, ...] = (2, 4)
    train_samples: int = 800
    test_samples: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        lows = (("bits", 1), ("train_samples", 1), ("test_samples", 1), ("seed", 0))
        for name, low in lows:
            check_integer(name, getattr(self, name), low)
        if self.bits > MAX_BITS:
            raise ValueError(f"bits: expected at most {MAX_BITS}, got {self.bits}")
        for times in self.longer:
            check_integer("longer", times, 2)
        if len(set(self.longer)) < len(self.longer):
            raise ValueError(f"longer: expected different multiples, got {list(self.longer)}")
        asked = self.train_samples + self.test_samples
        if asked > 2**self.bits:
            raise ValueError(
                f"train_samples and test_samples must fit into the {2**self.bits:,} strings of "
                f"{self.bits} bits, got {asked:,}"
            )


class BitStrings:
    """Strings of one length as a source of batches; a unit is a string.

    Args:
        bits: [N, length], 0 or 1.
        ids: the tokens of another vocabulary for those of `ALPHABET`.
    """

    def __init__(self, bits: np.ndarray, ids: Sequence[int] | None = None) -> None:
        self.bits = torch.from_numpy(bits.astype(np.int64))
        self.ids = torch.tensor(range(len(ALPHABET)) if ids is None else list(ids))

    @property
    def longest(self) -> int:
        return 1 + self.bits.shape[1]

    def __len__(self) -> int:
        return len(self.bits)

    def count(self, units: np.ndarray) -> np.ndarray:
        return np.ones_like(units)

    def fingerprint(self) -> int:
        return zlib.crc32(self.bits.numpy().data)

    def largest_token(self) -> int:
        return int(self.ids.max())

    def batch(self, units: np.ndarray) -> HostBatch:
        bits = self.bits[torch.from_numpy(units)]
        tokens = self.ids[F.pad(bits, (1, 0), value=ALPHABET.index("="))]
        targets = F.pad(self.ids[bits.cumsum(1) % 2], (1, 0), value=IGNORE)
        return HostBatch(tokens, targets, Tokens(*tokens.shape))


def draw_strings(config: ParityConfig) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Training strings [N, bits], unseen ones [n, bits], and by name ("2x") those that are longer,
    [n, times x bits] each. The unseen ones do not change with the number of training strings."""
    numbers: list[int] = []
    seen: set[int] = set()
    rng = np.random.default_rng([config.seed, 0])
    while len(numbers) < config.test_samples + config.train_samples:
        (number,) = rng.integers(2**config.bits, size=1).tolist()
        if number not in seen:
            seen.add(number)
            numbers.append(number)
    shifts = np.arange(config.bits - 1, -1, -1)
    strings = np.array(numbers)[:, None] >> shifts & 1
    longer = {
        f"{times}x": np.random.default_rng([config.seed, times]).integers(
            2, size=(config.test_samples, times * config.bits)
        )
        for times in config.longer
    }
    return strings[config.test_samples :], strings[: config.test_samples], longer
