"""Floating-point operations of training steps by formula: the least that each way can cost.

A layer has L operations a token in its linear maps, forward (two for each of 4 d^2 + 3 d d_ff
weights), and A in attention (two products with the keys that a token sees, half of the document on
average). What a pass takes forward and backward, in those:

                        L     A
    plain               3     3.5   1 + 2 and 1 + 2.5: the backward of attention has five products
    dual                6    10.5   twice the linear maps, three times the products of attention
    double_backward     6     9     v^T J is a forward and a backward, 2 and 3, whose backward is 4
                                    and 6; nothing is computed again
    func_jvp            8     9     a linear map also multiplies the tangent of its weight, which is
                                    zero, and takes its gradient: 3 forward and 5 backward
    autograd_jvp        7    11     v^T J for any v, 2 and 3; its derivative in v along the
                                    direction, 1 and 2; the backward of that through the tangents
                                    and the activations, 4 and 6
    finite_difference   6     7     two plain passes
    recomputed          4     4.5   plain, each layer computed again in the backward
    double_backward,    8    11     each layer computed again for the v^T J, and for its backward
      recomputed

Left out: norms, gates and other elementwise work, and at both ends of a block the cotangents that
nobody asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Sizes(NamedTuple):
    """Sizes of a looped transformer; d_ff counts three matrices, of gate, up and down."""

    width: int
    d_ff: int
    layers: int
    vocabulary: int


class Pass(NamedTuple):
    """Operations forward and backward, in those of a plain forward."""

    linear: float
    attention: float


PASSES = {
    "plain": Pass(3, 3.5),
    "dual": Pass(6, 10.5),
    "double_backward": Pass(6, 9),
    "func_jvp": Pass(8, 9),
    "autograd_jvp": Pass(7, 11),
    "finite_difference": Pass(6, 7),
    "recomputed": Pass(4, 4.5),
    "double_backward, recomputed": Pass(8, 11),
}


class Document(NamedTuple):
    """A document in a step: its tokens, the turns it takes, and whether it has the penalty."""

    length: int
    turns: float
    penalised: bool = False


class Passes(NamedTuple):
    """How a step runs its turns and its penalty, by the names of `PASSES`; with `shared` the
    penalty's pass stands for the last turn."""

    turn: str = "plain"
    penalty: str | None = None
    shared: bool = False


def layer_flops(way: str, width: int, d_ff: int, length: int) -> float:
    """FLOPs of one layer on one document, forward and backward."""
    linear = 2 * (4 * width**2 + 3 * width * d_ff)
    attention = 2 * length * width
    found = PASSES[way]
    return length * (found.linear * linear + found.attention * attention)


def head_flops(sizes: Sizes, positions: float) -> float:
    """FLOPs of the head at so many positions, forward and backward."""
    return 6.0 * sizes.width * sizes.vocabulary * positions


def step_flops(
    sizes: Sizes, documents: Iterable[Document], positions: float, passes: Passes
) -> float:
    """FLOPs of a training step on the documents; the head is evaluated at so many positions."""

    def turn(way: str, length: int) -> float:
        return sizes.layers * layer_flops(way, sizes.width, sizes.d_ff, length)

    total = head_flops(sizes, positions)
    for document in documents:
        total += document.turns * turn(passes.turn, document.length)
        if document.penalised and passes.penalty is not None:
            total += turn(passes.penalty, document.length)
            total -= turn(passes.turn, document.length) if passes.shared else 0.0
    return total


def block_floor(way: str, width: int, d_ff: int, length: int) -> float | None:
    """The cost of a pass over a plain one on one document; None for a way that is not known here.

    "last" is a dual turn that stands for a plain one: it costs what the dual one does.
    """
    way = "dual" if way == "last" else way
    if way not in PASSES:
        return None
    return layer_flops(way, width, d_ff, length) / layer_flops("plain", width, d_ff, length)
