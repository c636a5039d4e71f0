"""Seconds of a step the published way: every layer computed again in the backward, the penalty by
double backward through eager attention, logits of all positions.

What it touches is counted on `benchmarks/published.py` with a dispatch mode on a CPU, at two widths
and two lengths; PyTorch's ops run one by one.
"""

from __future__ import annotations

from typing import NamedTuple

from stars_fast.models.shape import Shape
from stars_fast.training.plan.passes import Machine, Seconds
from stars_fast.training.plan.rates import copy_rate


class Count(NamedTuple):
    """Work of one layer, forward and backward, with what is computed again.

    width, inner: elements of 2 bytes a token, by width of state and MLP. square: values in fp32 for
    each pair of tokens and head. weights: times that each weight is touched, 2 bytes each. maps:
    products of the linear maps, those of a forward being one. single: products of attention in
    fp32. ops: launches.
    """

    width: float
    inner: float
    square: float
    weights: float
    maps: int
    single: int
    ops: int


TURN = Count(432, 20, 0, 12.8, 4, 0, 255)
PENALTY = Count(1371, 104, 62.7, 15, 8, 22, 705)


def _layers(shape: Shape, lengths: list[float], machine: Machine, count: Count) -> Seconds:
    """Without attention in one kernel."""
    tokens, rates = sum(lengths), machine.rates
    squares = sum(n * n for n in lengths)
    moved = 2 * (count.width * shape.width + count.inner * shape.inner) * tokens
    moved += 2 * count.weights * shape.layer_weights * len(lengths)
    moved += 4 * count.square * shape.heads * squares
    single = count.single * 2 * squares * shape.queries
    return (
        Seconds(
            products=machine.product(2 * count.maps * shape.layer_weights * tokens),
            attention=single / (rates.single * machine.card.fp32),
            traffic=moved / (rates.eager * copy_rate(machine.card, rates)),
            host=count.ops * rates.op * len(lengths),
        )
        * shape.layers
    )


def published_turn(shape: Shape, lengths: list[float], machine: Machine) -> Seconds:
    """A turn forward, forward again and backward; documents of these lengths, one by one."""
    attention = sum(
        times * machine.attend(f"plain {each}", [n], shape.queries)
        for n in lengths
        for times, each in ((2, "forward"), (1, "backward"))
    )
    return _layers(shape, lengths, machine, TURN) + Seconds(attention=shape.layers * attention)


def published_penalty(shape: Shape, lengths: list[float], machine: Machine) -> Seconds:
    """The penalty with its gradient."""
    return _layers(shape, lengths, machine, PENALTY)


def published_head(shape: Shape, tokens: float, machine: Machine) -> Seconds:
    """Head and loss at all positions: logits in 16 bits and in fp32, log-softmax and gradient."""
    logits = (2 * 4 + 4 * 6) * shape.vocabulary * tokens
    return Seconds(
        products=machine.product(6 * shape.head_weights * tokens),
        traffic=logits / (machine.rates.eager * copy_rate(machine.card, machine.rates)),
    )
