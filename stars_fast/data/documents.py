"""Tokenised documents as batches: packed one after the other, or padded to the longest."""

import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stars_fast.data import IGNORE
from stars_fast.data.batches import HostBatch
from stars_fast.data.packing import pack
from stars_fast.tokens import packed_tokens, padded_tokens


class Documents(Protocol):
    """Documents with their targets, as `TokenisedChats` offers them."""

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...

    def fingerprint(self) -> int: ...

    def largest_token(self) -> int: ...


class TokenDocuments:
    """Documents in memory: pairs of tokens [S] and, for each token, whether it is to be predicted,
    [S] bool."""

    def __init__(self, documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self.documents = documents

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens, _ in self.documents])

    def __len__(self) -> int:
        return len(self.documents)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.documents[index]

    def fingerprint(self) -> int:
        return zlib.crc32(b"".join(tokens.tobytes() for tokens, _ in self.documents))

    def largest_token(self) -> int:
        return max(int(tokens.max()) for tokens, _ in self.documents)


class PackedChats:
    """A unit is a row of whole chats; a batch is its rows one after the other, without a pad.

    chats: the documents. row_length: tokens of a row at most. seed: of the packing.
    """

    def __init__(self, chats: Documents, row_length: int, seed: int) -> None:
        self.chats = chats
        self.longest = row_length
        self.rows = pack(chats.lengths, row_length, seed)
        self._counts = np.array([len(row) for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, units: np.ndarray) -> np.ndarray:
        return self._counts[units]

    def fingerprint(self) -> int:
        return self.chats.fingerprint()

    def largest_token(self) -> int:
        return self.chats.largest_token()

    def batch(self, units: np.ndarray) -> HostBatch:
        documents = np.concatenate([self.rows[unit] for unit in units])
        parts = [next_tokens(self.chats, document) for document in documents]
        tokens, targets = (torch.cat(each).unsqueeze(0) for each in zip(*parts, strict=True))
        samples = packed_tokens([len(part[0]) for part in parts])
        return HostBatch(tokens, targets, samples)


class PaddedChats:
    """A unit is a chat; a batch is padded on the right to the longest of it.

    chats: the documents. pad: the token to fill up with; nothing depends on which it is.
    """

    def __init__(self, chats: Documents, pad: int) -> None:
        self.chats = chats
        self.pad = pad
        self.longest = int(chats.lengths.max())

    def __len__(self) -> int:
        return len(self.chats)

    def count(self, units: np.ndarray) -> np.ndarray:
        return np.ones_like(units)

    def fingerprint(self) -> int:
        return self.chats.fingerprint()

    def largest_token(self) -> int:
        return self.chats.largest_token()

    def batch(self, units: np.ndarray) -> HostBatch:
        parts = [next_tokens(self.chats, document) for document in units]
        tokens = padded([part[0] for part in parts], self.pad)
        targets = padded([part[1] for part in parts], IGNORE)
        lengths = torch.tensor([len(part[0]) for part in parts])
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        return HostBatch(tokens, targets, padded_tokens(mask))


def next_tokens(chats: Documents, document: int) -> tuple[Tensor, Tensor]:
    """The tokens [S] int64 of a document, and for each the token that follows it, [S] int64:
    `IGNORE` where that is no target, and at the end."""
    tokens, targets = (torch.from_numpy(np.array(each)) for each in chats.document(int(document)))
    tokens = tokens.long()
    following = torch.full_like(tokens, IGNORE)
    following[:-1] = torch.where(targets[1:], tokens[1:], IGNORE)
    return tokens, following


def padded(rows: Sequence[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
