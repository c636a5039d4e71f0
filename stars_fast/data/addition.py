"""The paper's addition task: n-digit sums as token sequences, the answer's digits reversed.

`1750 + 4733 = 6483` is the sequence `1750+4733=3846$`: reversed, each answer digit depends on
digits already in view and on one carry. `$` is the end token; sums of n digits, which are one
shorter than those of n + 1, get one pad `_` on the right. The loss falls on the answer and the
end token only.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stars_fast.base.checks import check_integer
from stars_fast.base.files import check_utf8
from stars_fast.base.unique_keys import parse_json
from stars_fast.data import IGNORE

MAX_DIGITS = 9


@dataclass
class AdditionConfig:
    """Which sums to train and to test on.

    digits: digits of both operands, 1 to 9; 4 means 1000 to 9999.
    train_samples: training sums; of a file, at most its first so many.
    test_samples: unseen sums; of a file, at most its first so many.
    seed: of the generated sums (not of the batch order).
    train_file: JSONL file to read instead of generating.
    test_file: JSONL file to read instead of generating.

    A file has one sum a line, as `read_jsonl` describes.

    Raises:
        ValueError: it names the first field that is out of range, or if more sums are asked for
            than exist.
    """

    digits: int = 4
    train_samples: int = 100_000
    test_samples: int = 1_000
    seed: int = 0
    train_file: str | None = None
    test_file: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("digits", 1), ("train_samples", 1), ("test_samples", 1), ("seed", 0)):
            check_integer(name, getattr(self, name), low)
        if self.digits > MAX_DIGITS:
            raise ValueError(f"digits: expected at most {MAX_DIGITS}, got {self.digits}")


class AdditionTokenizer:
    """One token a character: the ten digits, `+`, `=`, `$` (end) and `_` (pad)."""

    alphabet = "0123456789+=$_"
    vocab_size = len(alphabet)
    plus_id, equals_id, end_id, pad_id = 10, 11, 12, 13

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; ValueError for a character outside the alphabet."""
        unknown = sorted(set(text) - set(self.alphabet))
        if unknown:
            raise ValueError(f"text must use only {self.alphabet!r}, got {unknown}")
        return [self.alphabet.index(character) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; ValueError for an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        unknown = sorted({i for i in ids if not 0 <= i < self.vocab_size})
        if unknown:
            raise ValueError(f"ids: expected a value in 0..{self.vocab_size - 1}, got {unknown}")
        return "".join(self.alphabet[i] for i in ids)


class Batch(NamedTuple):
    """Model inputs and what to predict from each, [B, S] all three."""

    tokens: Tensor
    """int64 token ids, right-padded."""
    targets: Tensor
    """int64 ids of the next tokens, -100 where there is no loss."""
    mask: Tensor
    """bool, True where `tokens` is a real token and not a pad."""


class AdditionData:
    """The train and test sums of a configuration, encoded; no test sum is a training sum.

    `train` and `test` are [N, 3 digits + 4] int64, `train_pairs` and `test_pairs` the operands
    [N, 2] int64. `max_length` is the length of a batch. (a, b) and (b, a) count as two sums. `ids`
    are the tokens of another vocabulary for those of `AdditionTokenizer`; batches are in them.

    Raises:
        ValueError: the files share sums, if a line of a file is bad, or if there are not enough
            different sums.
    """

    def __init__(self, config: AdditionConfig, ids: Sequence[int] | None = None) -> None:
        self.config = config
        self.ids = None if ids is None else torch.tensor(ids)
        self.tokenizer = AdditionTokenizer()
        self.max_length = 3 * config.digits + 3
        train, test = _pairs(config)
        self.train_pairs, self.test_pairs = train, test
        self.train = encode_sums(train, config.digits)
        self.test = encode_sums(test, config.digits)

    def batch(self, split: str, indices: Tensor) -> Batch:
        """The sums of `split` ("train" or "test") at `indices` [B] int64, as a `Batch`.

        S = `max_length` always, so shapes never change.

        Raises:
            ValueError: another split.
        """
        if split not in ("train", "test"):
            raise ValueError(f"split: expected 'train' or 'test', got {split!r}")
        sequences = (self.train if split == "train" else self.test)[indices]
        tokens, targets = sequences[:, :-1], sequences[:, 1:]
        first = 2 * self.config.digits + 1  # the place of `=`, which predicts the answer
        silent = torch.arange(self.max_length) < first
        targets = targets.masked_fill(silent | (targets == self.tokenizer.pad_id), IGNORE)
        mask = tokens != self.tokenizer.pad_id
        if self.ids is not None:
            tokens = self.ids[tokens]
            targets = torch.where(targets == IGNORE, IGNORE, self.ids[targets.clamp(0)])
        return Batch(tokens, targets, mask)


def token_ids(tokenizer: Any, alphabet: str = AdditionTokenizer.alphabet) -> list[int]:
    """Ids of a tokenizer of transformers for the characters of an alphabet, by default that of the
    sums, in its order.

    Raises:
        ValueError: it has no token for one of them alone.
    """
    found = [tokenizer.encode(each, add_special_tokens=False) for each in alphabet]
    missing = [each for each, ids in zip(alphabet, found, strict=True) if len(ids) != 1]
    if missing:
        raise ValueError(
            f"the model's tokenizer: expected one token for each of {alphabet!r}, got none for "
            f"{missing}"
        )
    return [ids[0] for ids in found]


def encode_sums(pairs: np.ndarray, digits: int) -> Tensor:
    """Operands [N, 2] of `digits` digits each -> token sequences [N, 3 digits + 4] int64."""
    tokenizer = AdditionTokenizer
    a, b = pairs[:, :1], pairs[:, 1:]
    powers = 10 ** np.arange(digits + 1)
    answer = (a + b) // powers % 10
    has_carry = a + b >= 10**digits
    answer[:, digits:] = np.where(has_carry, 1, tokenizer.end_id)
    columns = (
        a // powers[digits - 1 :: -1] % 10,
        np.full_like(a, tokenizer.plus_id),
        b // powers[digits - 1 :: -1] % 10,
        np.full_like(a, tokenizer.equals_id),
        answer,
        np.where(has_carry, tokenizer.end_id, tokenizer.pad_id),
    )
    return torch.from_numpy(np.concatenate(columns, axis=1))


def read_jsonl(path: str | Path, digits: int) -> np.ndarray:
    """Operands [N, 2] int64 of a JSONL file of sums with operands of `digits` digits.

    One sum a line: {"num1": 1750, "num2": 4733, "expression": "1750 + 4733", "answer": 6483}. Other
    keys are ignored.

    Raises:
        ValueError: with the file, the line number and the reason for the first bad line, and for a
            file that can't be read or is not UTF-8.
    """
    check_utf8(path)
    pairs = []
    with Path(path).open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                pairs.append(_parse_sum(line, digits))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not pairs:
        raise ValueError(f"{path}: expected at least one sum, the file is empty")
    return np.array(pairs, dtype=np.int64)


def write_jsonl(path: str | Path, pairs: np.ndarray) -> None:
    """Write the sums of operands [N, 2] in the shape that `read_jsonl` reads."""
    with Path(path).open("w", encoding="utf-8") as file:
        for a, b in pairs.tolist():
            record = {"num1": a, "num2": b, "expression": f"{a} + {b}", "answer": a + b}
            file.write(json.dumps(record) + "\n")


def _parse_sum(line: str, digits: int) -> tuple[int, int]:
    if not line.strip():
        raise ValueError("expected a JSON object, the line is empty")
    try:
        record: Any = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    for key, kind in (("num1", int), ("num2", int), ("expression", str), ("answer", int)):
        if key not in record:
            raise ValueError(f"missing key {key!r}")
        if type(record[key]) is not kind:
            raise ValueError(f"{key}: expected {kind.__name__}, got {record[key]!r}")
    a, b, answer = record["num1"], record["num2"], record["answer"]
    for key in ("num1", "num2", "answer"):
        if record[key] < 0:
            raise ValueError(f"{key}: expected 0 or more, got {record[key]}")
    for key in ("num1", "num2"):
        if not 10 ** (digits - 1) <= record[key] < 10**digits:
            raise ValueError(f"{key}: expected {digits} digits, got {record[key]}")
    if answer != a + b:
        raise ValueError(f"answer: expected {a} + {b} = {a + b}, got {answer}")
    if record["expression"].replace(" ", "") != f"{a}+{b}":
        raise ValueError(f"expression: expected '{a} + {b}', got {record['expression']!r}")
    return a, b


def _pairs(config: AdditionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Operands of the train and of the test split, read or generated, without a common pair."""
    files = {"train": config.train_file, "test": config.test_file}
    counts = {"train": config.train_samples, "test": config.test_samples}
    pairs = {
        split: read_jsonl(file, config.digits)[: counts[split]]
        for split, file in files.items()
        if file is not None
    }
    if len(pairs) == 2:
        common = set(map(tuple, pairs["train"].tolist())) & set(map(tuple, pairs["test"].tolist()))
        if common:
            a, b = min(common)
            raise ValueError(
                f"test_file: expected no sums of train_file, got {len(common)} in both, "
                f"such as {a} + {b}"
            )
    # The test split first: it does not change with the number of training sums.
    for split in ("test", "train"):
        if split not in pairs:
            taken = np.concatenate([np.empty((0, 2), np.int64), *pairs.values()])
            rng = np.random.default_rng([config.seed, split == "train"])
            pairs[split] = _generate(rng, config.digits, counts[split], taken)
    return pairs["train"], pairs["test"]


def _generate(rng: np.random.Generator, digits: int, count: int, taken: np.ndarray) -> np.ndarray:
    """`count` different pairs [count, 2] of `digits`-digit operands, none of them in `taken`."""
    low, operands = 10 ** (digits - 1), 9 * 10 ** (digits - 1)
    taken = np.unique((taken[:, 0] - low) * operands + taken[:, 1] - low)
    free = operands**2 - len(taken)
    if count > free:
        raise ValueError(
            f"train_samples and test_samples must fit into the {operands**2} sums of "
            f"{digits}-digit operands, got {count} where {free} are left"
        )
    # Of so many different draws at least `count` are free, whatever is taken.
    draws = rng.choice(operands**2, count + len(taken), replace=False)
    draws = draws[~np.isin(draws, taken)][:count]
    return np.stack([low + draws // operands, low + draws % operands], axis=1)
