"""GPUs: what each can do, from `cards.json`."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from stars_fast.base.errors import ConfigError


class Card(NamedTuple):
    """A GPU.

    Attributes:
        name: as `cards.json` has it.
        bf16: dense products a second, tensor cores, FLOP/s.
        fp32: without tensor cores, FLOP/s.
        bandwidth: of its memory, bytes a second.
        memory: bytes that PyTorch sees.
        link: to its neighbours in one direction, bytes a second.
        copy: bytes a second that a copy moves, where that was measured.
    """

    name: str
    bf16: float
    fp32: float
    bandwidth: float
    memory: float
    link: float
    copy: float | None = None


@cache
def cards() -> dict[str, Card]:
    """Every card by name."""
    read = json.loads(Path(__file__).with_name("cards.json").read_text(encoding="utf-8"))
    found = {}
    for name, row in read["cards"].items():
        copy = row.get("measured", {}).get("copy")
        found[name] = Card(
            name,
            row["bf16"] * 1e12,
            row["fp32"] * 1e12,
            row["bandwidth"] * 1e9,
            row["memory"] * 2**30,
            row["link"] * 1e9,
            None if copy is None else copy * 1e9,
        )
    return found


def card_of_device(name: str) -> Card | None:
    """The card that a device's name, as CUDA gives it, belongs to; None for one that is not known.

    Of cards of one name and several sizes the peaks are the same.
    """
    words = set(re.split(r"[\s_-]+", name.lower()))
    best = None
    for card in cards().values():
        parts = card.name.lower().split("-")
        fits = [part for part in parts if part in words]
        matches = len(fits) == len(parts) if parts[0] == "rtx" else parts[0] in words
        if matches and (best is None or len(fits) > best[0]):
            best = len(fits), card
    return None if best is None else best[1]


class Gpus(NamedTuple):
    """So many cards of a kind."""

    number: int
    card: Card


def parse_gpus(text: str) -> Gpus:
    """GPUs from words such as 4xA800-80GB, 8xh100 or RTX-4090.

    Raises:
        ConfigError: there is no such card, or several; the known are named.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?(.+?)\s*", text)
    count, name = (int(match[1] or 1), match[2]) if match else (0, text)
    wanted = name.lower().replace("_", "-").replace(" ", "-")
    exact = [card for card in cards().values() if card.name.lower() == wanted]
    found = exact or [card for card in cards().values() if card.name.lower().startswith(wanted)]
    found = found or [card for card in cards().values() if wanted in card.name.lower().split("-")]
    if count < 1 or len(found) != 1:
        known = ", ".join(card.name for card in (found or cards().values()))
        raise ConfigError(
            f"--gpus: expected a number and one of {known}, as in 4xH200, got {text!r}"
        )
    return Gpus(count, found[0])
