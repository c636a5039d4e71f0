"""The sums of the paper's addition study, with tokens of their own or in those of a tokenizer."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from stars_fast.data.addition import AdditionConfig, AdditionData, AdditionTokenizer, token_ids
from stars_fast.data.batches import HostBatch
from stars_fast.data.kinds import DataKind, OpenData
from stars_fast.tokens import padded_tokens


@dataclass
class SumsSection(AdditionConfig):
    """Sums to train on, and unseen ones to judge on.

    kind: sums.
    """

    kind: Literal["sums"] = "sums"


class Sums:
    """A split of the sums as a source of batches; a unit is a sum."""

    def __init__(self, data: AdditionData, split: Literal["train", "test"] = "train") -> None:
        self.data = data
        self.split = split
        self.rows = data.train if split == "train" else data.test

    @property
    def longest(self) -> int:
        return self.data.max_length

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, units: np.ndarray) -> np.ndarray:
        return np.ones_like(units)

    def fingerprint(self) -> int:
        return zlib.crc32(self.rows.numpy().data)

    def largest_token(self) -> int:
        ids = self.data.ids
        return AdditionTokenizer.vocab_size - 1 if ids is None else int(ids.max())

    def batch(self, units: np.ndarray) -> HostBatch:
        tokens, targets, mask = self.data.batch(self.split, torch.from_numpy(units))
        return HostBatch(tokens, targets, padded_tokens(mask))


class SumsKind(DataKind):
    section = SumsSection
    exact_match = True
    own_tokens = AdditionTokenizer.vocab_size

    def longest(self, section: SumsSection) -> int:
        return 3 * section.digits + 3

    def sample(self, section: SumsSection) -> tuple[int, int]:
        return self.longest(section), section.digits + 2

    def unread(self, section: SumsSection) -> dict[str, str]:
        read = section.train_file is None or section.test_file is None
        return {} if read else {"seed": "both splits are files"}

    def open(self, section: SumsSection, tokenizer: Any, seed: int, quiet: bool = True) -> OpenData:
        try:
            ids = None if tokenizer is None else token_ids(tokenizer)
            data = AdditionData(section, ids)
        except (ValueError, OSError) as error:
            raise ValueError(f"data: {error}") from error
        return OpenData(Sums(data), Sums(data, "test"), f"{section.digits}-digit sums")


KIND = SumsKind()
