"""Plain text files, cut into windows of tokens, every one of which is predicted."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stars_fast.base.checks import check_integer
from stars_fast.base.files import read_text
from stars_fast.data.batches import Source
from stars_fast.data.documents import PaddedChats, TokenDocuments
from stars_fast.data.kinds import DataKind, OpenData


@dataclass
class TextSection:
    """Text to train on.

    source: a text file in UTF-8, or a glob of such files, each read as one text.
    length: tokens of a window, the begin token included.
    validation: windows held out, the last of all.
    kind: text.
    """

    source: str
    length: int = 512
    validation: int = 0
    kind: Literal["text"] = "text"

    def __post_init__(self) -> None:
        check_integer("length", self.length, 2)
        check_integer("validation", self.validation, 0)


class TextKind(DataKind):
    section = TextSection

    def longest(self, section: TextSection) -> int:
        return section.length

    def open(self, section: TextSection, tokenizer: Any, seed: int, quiet: bool = True) -> OpenData:
        windows = text_windows(_texts(section.source), tokenizer, section.length)
        kept = len(windows) - section.validation
        if kept < 1:
            raise ValueError(
                f"data.validation: expected less than the {len(windows)} windows of data.source, "
                f"got {section.validation}"
            )
        pad = tokenizer.pad_token_id or 0
        tokens = sum(map(len, windows))
        documents = [(window, np.arange(len(window)) > 0) for window in windows]
        train = PaddedChats(TokenDocuments(documents[:kept]), pad)
        held_out: Source | None = None
        if section.validation:
            held_out = PaddedChats(TokenDocuments(documents[kept:]), pad)
        note = f"data: {len(windows):,} windows of text, {tokens:,} tokens"
        return OpenData(train, held_out, "windows of text", (note,))


def text_windows(texts: list[str], tokenizer: Any, length: int) -> list[np.ndarray]:
    """Windows [S] int64 of at most `length` tokens that don't overlap: a begin token, and tokens of
    one text.

    Raises:
        ValueError: no text has a token, or the tokenizer has neither a begin nor an end token.
    """
    begin = tokenizer.bos_token_id
    begin = tokenizer.eos_token_id if begin is None else begin
    if begin is None:
        raise ValueError("tokenizer: expected a begin or an end token, got neither")
    windows = []
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        for start in range(0, len(tokens), length - 1):
            windows.append(np.array([begin, *tokens[start : start + length - 1]]))
    if not windows:
        raise ValueError("data.source: expected a token at least, got none")
    return windows


def _texts(source: str) -> list[str]:
    place = os.path.expanduser(source)
    paths = [Path(place)] if Path(place).is_file() else sorted(map(Path, glob.glob(place)))
    if not paths:
        raise ValueError(f"data.source: expected a text file or a glob of some, got {source!r}")
    try:
        return [read_text(path) for path in paths]
    except ValueError as error:
        raise ValueError(f"data.source: {error}") from error


KIND = TextKind()
