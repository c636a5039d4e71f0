"""How much of what a card can do the work of a step gets, and what the host takes: `rates.json`.

All was measured on one H200 (`benchmarks/results/2026-11-28-h200.json`), on blocks of one layer and
on ops alone; `tests/training/plan` derives the numbers from that file and holds predictions against
its other rows. For other cards the same fractions are assumed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from stars_fast.training.plan.cards import Card, cards

FULL = 2048
"""Tokens at which the time beside attention's products was measured."""

TILE = 128
"""Keys by which a causal kernel goes past the diagonal."""

PRODUCTS = {"plain forward": 2, "plain backward": 5, "dual forward": 6, "dual backward": 15}
"""Products of attention, each of every query with the keys that it sees."""


class Rates(NamedTuple):
    """Fractions of a card's peaks, and seconds of the host.

    Attributes:
        copy: of the bandwidth, that a copy gets.
        products: of the peak in bf16, that products of matrices get.
        single: of the peak in fp32, that products in fp32 get.
        eager: of a copy's rate, that elementwise ops get which PyTorch runs one by one.
        rows: of a copy's rate, that our row ops get, by op and direction.
        attention: of the peak in bf16, that attention gets, by kind and direction.
        latency: seconds that attention takes at least, on the card that was measured.
        call: seconds of a pass beside its layers.
        host: seconds of the host for a layer forward and backward, by kind of layer and pass.
        op: seconds of the host for one op of PyTorch's, its backward included.
    """

    copy: float
    products: float
    single: float
    eager: float
    rows: dict[str, float]
    attention: dict[str, float]
    latency: dict[str, float]
    call: float
    host: dict[str, float]
    op: float


@cache
def rates() -> Rates:
    """Those of `rates.json`."""
    read = json.loads(Path(__file__).with_name("rates.json").read_text(encoding="utf-8"))
    return Rates(**read["rates"])


def copy_rate(card: Card, rates: Rates) -> float:
    """Bytes a second that a copy on the card moves."""
    return card.copy or rates.copy * card.bandwidth


def attention_seconds(
    kind: str, lengths: list[float], width: int, card: Card, rates: Rates
) -> float:
    """Seconds of causal attention over documents of these lengths, heads of `width` in all.

    What it takes beside its products is that of a card that is not full: measured at 2,048 tokens,
    less in proportion below that.
    """
    pairs = sum(n * (n + TILE) / 2 for n in lengths)
    flops = PRODUCTS[kind] * 2 * pairs * width
    latency = rates.latency[kind] * cards()["H200"].bf16 / card.bf16
    latency *= min(sum(lengths) / FULL, 1.0)
    return latency + flops / (rates.attention[kind] * card.bf16)
