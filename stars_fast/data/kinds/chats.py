"""Chats, from anything that `datasets` reads or as the package makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from stars_fast.base.seeds import derive
from stars_fast.data.batches import Source
from stars_fast.data.chat import ChatDataConfig
from stars_fast.data.documents import PackedChats, PaddedChats
from stars_fast.data.kinds import DataKind, OpenData
from stars_fast.data.packing import efficiency
from stars_fast.data.sources import TINY_CHAT
from stars_fast.data.tokenised import load_chats


@dataclass
class ChatsSection(ChatDataConfig):
    """Chats to train on.

    kind: chats.
    """

    kind: Literal["chats"] = "chats"


class ChatsKind(DataKind):
    section = ChatsSection

    def longest(self, section: ChatsSection) -> int:
        return section.max_length

    def packs(self, section: ChatsSection) -> bool:
        return section.packing

    def unread(self, section: ChatsSection) -> dict[str, str]:
        found = {} if section.packing else {"row_length": "data.packing is false"}
        if section.source == TINY_CHAT:
            found |= dict.fromkeys(("subset", "split"), f"data.source is {TINY_CHAT}")
        return found

    def open(
        self, section: ChatsSection, tokenizer: Any, seed: int, quiet: bool = True
    ) -> OpenData:
        drawn = derive(seed, "data") % 2**32
        train, validation = load_chats(section, tokenizer, drawn, quiet=quiet)
        notes = [f"data: {train.info}"]
        if train.info.warning:
            notes.append(f"warning: {train.info.warning}")
        pad = tokenizer.pad_token_id or 0
        source: Source = PaddedChats(train, pad)
        if section.packing:
            longest = section.row_length or section.max_length
            packed = PackedChats(train, longest, derive(seed, "packing") % 2**32)
            full = efficiency(packed.rows, train.lengths, longest)
            notes.append(f"packed in {len(packed):,} rows of {longest:,} tokens, {full:.1%} full")
            source = packed
        held_out = None if validation is None else PaddedChats(validation, pad)
        return OpenData(source, held_out, "chats", tuple(notes))


KIND = ChatsKind()
