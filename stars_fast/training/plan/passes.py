"""Seconds of the passes through the block, by count: linear maps, attention, everything between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import NamedTuple

from stars_fast.models.shape import Shape
from stars_fast.training.plan.cards import Card
from stars_fast.training.plan.rates import Rates, attention_seconds, copy_rate
from stars_fast.training.plan.trained import Trained

ALL = Trained()

HOST_FORWARD = 0.48
"""Part of a layer's host time that its forward takes (20.5 of 43 ms, `benchmarks.host_cost`)."""

ADAPTED_HOST = {
    ("plain", "forward"): 136 / 59,
    ("plain", "backward"): 209 / 99,
    ("dual", "forward"): 202 / 111,
    ("dual", "backward"): 305 / 195,
}
"""Host time of a layer with an adapter on each of its maps over that of one without: by the ops
that they dispatch (`python -m benchmarks.host_cost --ops --rank 8`), not measured in time."""


@dataclass(frozen=True)
class Seconds:
    """Time of the GPU by what it does, and of the host beside it.

    products: of the linear maps. attention: in one kernel. traffic: all else that moves memory.
    recompute: whatever of those is done a second time. host: Python and launches.
    """

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    recompute: float = 0.0
    host: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Seconds:
        return Seconds(*(times * each for each in astuple(self)))

    @property
    def gpu(self) -> float:
        """Seconds of the GPU alone."""
        return self.products + self.attention + self.traffic + self.recompute

    @property
    def again(self) -> Seconds:
        """The same work, done a second time."""
        return Seconds(recompute=self.gpu, host=self.host)


class Machine(NamedTuple):
    """A card, the rates it is taken to have, and whether it computes in 16 bits."""

    card: Card
    rates: Rates
    low: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of a number that the turns compute with."""
        return 2 if self.low else 4

    @property
    def peak(self) -> float:
        """FLOP/s of products at best."""
        return self.card.bf16 if self.low else self.card.fp32

    def product(self, flops: float) -> float:
        """Seconds of products of matrices."""
        return flops / (self.peak * (self.rates.products if self.low else self.rates.single))

    def moved(self, size: float) -> float:
        """Seconds of so many bytes, read and written at the rate of a fused elementwise op."""
        return size / (self.rates.rows["gate forward"] * copy_rate(self.card, self.rates))

    def rows(self, elements: Mapping[str, float]) -> float:
        """Seconds a token of row ops that read and write so many elements; eager for those that
        PyTorch runs one by one."""
        known = self.rates.rows | {"eager": self.rates.eager}
        copy = copy_rate(self.card, self.rates)
        return sum(self.itemsize * n / (known[op] * copy) for op, n in elements.items())

    def attend(self, kind: str, lengths: list[float], width: int) -> float:
        """Seconds of attention of one kind over documents of these lengths."""
        found = attention_seconds(kind, lengths, width, self.card, self.rates)
        return found * self.card.bf16 / self.peak


def _elements(shape: Shape, backward: bool) -> dict[str, float]:
    """Elements that a layer's row ops read and write for a token."""
    d, heads = shape.width, shape.queries + shape.keys
    if not shape.native:  # counted on `benchmarks.blocks.SandwichLayer`: 86 D + 17 F both ways
        return {"eager": (50 if backward else 36) * d + (10 if backward else 7) * shape.inner}
    if backward:
        return {
            "norm backward": 6 * d,
            "sandwich backward": 6 * d,
            "gate backward": 5 * shape.inner,
            "rotary backward": 2 * heads,
            "gate forward": 15 * d,  # sums of cotangents, five a layer
        }
    return {
        "norm forward": 4 * d,
        "sandwich forward": 4 * d,
        "gate forward": 3 * shape.inner + 3 * d,  # and the sum at the layer's end
        "rotary forward": 2 * heads,
    }


def turn(
    shape: Shape,
    lengths: list[float],
    machine: Machine,
    *,
    backward: bool,
    dual: bool = False,
    trained: Trained = ALL,
) -> Seconds:
    """One turn forward, or backward, over documents of these lengths; with `dual` of a pair, with
    the gradients of what is `trained` of its weights."""
    if backward and not trained.reaches_turns:
        return Seconds()
    tokens, rates = sum(lengths), machine.rates
    way, each = "dual" if dual else "plain", "backward" if backward else "forward"
    halves = 2 if dual else 1
    maps = halves * (1 + (trained.block if backward else 0))
    host = rates.host[way if shape.native else f"{way}, generic"]
    host *= 1 - HOST_FORWARD if backward else HOST_FORWARD
    host *= ADAPTED_HOST[way, each] if trained.rank else 1
    attention = machine.attend(f"{way} {each}", lengths, shape.queries)
    return Seconds(
        products=machine.product(2 * maps * shape.block_weights * tokens),
        attention=shape.layers * attention,
        traffic=shape.layers * halves * machine.rows(_elements(shape, backward)) * tokens,
        host=shape.layers * host,
    )


def turn_flops(
    shape: Shape, lengths: list[float], dual: bool = False, trained: Trained = ALL
) -> float:
    """FLOPs that a turn needs forward and backward; three times those of the forward for linear
    maps that are all `trained`, 7 or 21 products for attention."""
    pairs = sum(n * n / 2 for n in lengths)
    maps = (2 + trained.block) * (2 if dual else 1) * 2 * shape.block_weights * sum(lengths)
    return maps + (21 if dual else 7) * 2 * pairs * shape.queries * shape.layers


def norms_and_gates(shape: Shape, tokens: float, machine: Machine) -> Seconds:
    """The second time of what selective recomputation leaves out of a turn."""
    elements = {"norm forward": 4 * shape.width, "gate forward": 3 * shape.inner}
    return Seconds(recompute=shape.layers * machine.rows(elements) * tokens)


def head(shape: Shape, positions: float, machine: Machine, trained: Trained = ALL) -> Seconds:
    """Head and loss at so many positions, forward and backward."""
    maps = 1 + trained.reaches_turns + trained.head
    logits = 4 * 4 * shape.vocabulary * positions  # fp32, written, read, its gradient the same
    return Seconds(
        products=machine.product(2 * maps * shape.head_weights * positions),
        traffic=machine.moved(logits),
    )
