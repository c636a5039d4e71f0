"""The parities of strings of bits, judged on longer strings too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from stars_fast.data.addition import token_ids
from stars_fast.data.kinds import DataKind, OpenData
from stars_fast.data.parity import ALPHABET, BitStrings, ParityConfig, draw_strings


@dataclass
class ParitySection(ParityConfig):
    """Strings of bits to train on, and unseen and longer ones to judge on.

    kind: parity.
    """

    kind: Literal["parity"] = "parity"


class ParityKind(DataKind):
    section = ParitySection
    exact_match = True
    own_tokens = len(ALPHABET)

    def longest(self, section: ParitySection) -> int:
        return 1 + section.bits * max((1, *section.longer))

    def sample(self, section: ParitySection) -> tuple[int, int]:
        return 1 + section.bits, section.bits

    def open(
        self, section: ParitySection, tokenizer: Any, seed: int, quiet: bool = True
    ) -> OpenData:
        try:
            ids = None if tokenizer is None else token_ids(tokenizer, ALPHABET)
        except ValueError as error:
            raise ValueError(f"data: {error}") from error
        train, test, longer = draw_strings(section)
        return OpenData(
            BitStrings(train, ids),
            BitStrings(test, ids),
            f"strings of {section.bits} bits",
            further={name: BitStrings(bits, ids) for name, bits in longer.items()},
        )


KIND = ParityKind()
