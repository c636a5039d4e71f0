"""Memory of the training step: what the backward keeps, and what it computes a second time where
all of that does not fit. Arithmetic alone: `measure.py` has the bytes, `budget.py` what is free.

    one micro-batch -> Activations (bytes) --+
    free memory ----> budget ----------------+-> choose(turns) -> Choice (logged, for run_turns)

What is alive at the worst moments of a step of T turns, r of them recomputed:

    shared + r state + (T - r) turn      kept by the turns, when the last one has run
      + rest + dual + flight             the dual turn's backward, which comes first
      + 2 rest + sums                    or: the head's backward, with the gradient of what it kept
      + layer + sums                     or: the backward of the last turn
    shared + r state + turn + layer      the r-th turn, recomputed and going backward; the plain
      + held                             turns after it are gone by then

With layers recomputed, `turn_by_layer` stands for `state`, and the last line ends in `layer` twice:
one recomputed layer and the gradients of its backward. `flight` are the gradients of a dual layer;
with the dual turn recomputed `dual_by_layer` stands for `dual`, and `flight` counts twice. That
gradients in flight take at most what one layer keeps is the only figure that is not measured.

With norms and gates recomputed (selective), `turn_selective` and `dual_selective` stand for `turn`
and `dual` where those are kept, and a layer's backward has what it makes again besides.

`sums` are the gradients of the block's weights while the turns add to them: all those after a dual
turn, and after a turn as many as that turn has added. Autograd holds them beside the parameters'
own gradients until the first of the turns has added its part. Those of copies that autocast made
are gone where a recomputed turn has its own copies; `held` are the others.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stars_fast.base.checks import check_number
from stars_fast.training.step.turns import KEEP_ALL, Recompute

GIB = 1024**3

DUAL_COST = 2
"""Time of a dual turn over that of a turn."""

SELECTIVE_COST = 0.07
"""Time of the norms and gates of a turn that are made again, in turns run forward: 15 x 4 KB of
traffic a token and layer of Ouro-1.4B beside 0.1 GFLOP (by count; not measured on a GPU)."""


@dataclass
class MemoryConfig:
    """Which activations the backward keeps and which it computes a second time.

    recompute: none, selective (norms and gates), turn (all turns, one at a time), layer (all layers
        of turns and dual turn, one at a time), or auto: the least that fits in the budget.
    budget: GiB for activations on a device; none for the free memory less what gradients and
        optimiser state still will take.
    """

    recompute: Literal["auto", "none", "selective", "turn", "layer"] = "auto"
    budget: float | None = None

    def __post_init__(self) -> None:
        choices = ("auto", "none", "selective", "turn", "layer")
        if self.recompute not in choices:
            raise ValueError(f"recompute: expected one of {choices}, got {self.recompute!r}")
        if self.budget is not None:
            check_number("budget", self.budget, 0.0, open_low=True)


class Activations(NamedTuple):
    """Bytes kept for the backward of one micro-batch.

    state: h itself.
    turn: by one plain turn, with the state it starts from.
    layer: by the biggest layer of a turn, with its part of what is shared; by the turn where layers
        are not known.
    turn_selective: by one turn whose norms and gates are recomputed.
    turn_by_layer: by one turn whose layers are recomputed; None where layers are not known.
    dual, dual_layer, dual_selective, dual_by_layer: the same of the dual turn.
    rest: prelude, coda, head and loss.
    shared: what all turns keep together: weights cast by autocast, masks, tables.
    copies: the part of it that is weights; their gradients are summed in as many bytes.
    weights: gradients of the block's other weights, which are summed as they are.
    """

    state: int
    turn: int
    layer: int
    turn_selective: int
    turn_by_layer: int | None
    dual: int
    dual_layer: int
    dual_selective: int
    dual_by_layer: int | None
    rest: int
    shared: int
    copies: int
    weights: int

    def scaled(self, ratio: float) -> "Activations":
        """For a micro-batch of `ratio` times as many tokens, in rows of the same length."""
        sizes: dict[str, Any] = self._asdict()
        for name, size in sizes.items():
            if size is not None and name not in ("shared", "copies", "weights"):
                sizes[name] = round(size * ratio)
        return Activations(**sizes)


class Choice(NamedTuple):
    """A choice of what is recomputed, and its bytes of activations at the peak."""

    recompute: Recompute
    peak: int
    budget: int | None

    @property
    def fits(self) -> bool:
        """Whether the peak is expected to stay within the budget."""
        return self.budget is None or self.peak <= self.budget

    def describe(self) -> str:
        """One line for the log, with a warning where it does not fit."""
        line = f"{self.recompute.describe()}: activations take {gib(self.peak)}"
        if self.budget is None:
            return f"{line} (free memory is not known here)"
        if self.fits:
            return f"{line} of {gib(self.budget)}"
        return (
            f"warning: activations are expected to take {gib(self.peak)}, more than the budget of "
            f"{gib(self.budget)}, and the step {self.recompute.describe()}; make micro-batches or "
            "rows smaller"
        )


def peak(activations: Activations, recompute: Recompute, turns: int, penalised: bool = True) -> int:
    """Bytes of activations at the worst moment of a step of `turns` turns in the graph.

    `penalised` says whether the step has a dual turn. The docstring of this file derives it.

    Raises:
        ValueError: a choice by layers that are not known.
    """
    a, r = activations, min(recompute.turns, turns)
    by_layer = recompute.per == "layer"
    turn = a.turn_selective if recompute.selective else a.turn
    again = round(a.layer * max(1 - turn / a.turn, 0)) if a.turn else 0
    before = a.shared + r * (_known(a.turn_by_layer) if by_layer else a.state)
    kept = before + (turns - r) * turn
    sums = a.copies + a.weights
    dual, flight = 0, 0
    if penalised and a.dual:
        dual, flight = a.dual, a.dual_layer
        if recompute.dual:
            dual, flight = _known(a.dual_by_layer), 2 * a.dual_layer
        elif recompute.selective:
            dual = a.dual_selective
            flight += round(a.dual_layer * max(1 - dual / a.dual, 0))
        first = kept + max(a.rest + dual + flight, 2 * a.rest + sums, a.layer + again + sums)
    else:
        # A turn's part of the sums comes while what it kept goes.
        first = kept + max(2 * a.rest, a.layer + again + max(sums - turn, 0))
    if r == 0:
        return first
    once = 2 * a.layer if by_layer else a.turn + a.layer
    return max(first, before + once + a.weights)


def choose(
    config: MemoryConfig,
    activations: Activations,
    budget: int | None,
    turns: int,
    penalised: bool = True,
) -> Choice:
    """Choose what to recompute in a step of `turns` turns in the graph; arithmetic alone.

    Under "auto" the choice is the one that costs the least time of those that fit in `budget`
    bytes, of equals the smallest; where none fits the smallest of all. So less budget never keeps
    more. `budget` None stands for no limit.

    Raises:
        ValueError: recompute "layer" where the layers are not known.
    """
    layers = activations.turn_by_layer is not None
    dual = penalised and activations.dual > 0
    if config.recompute == "none":
        plans = [KEEP_ALL]
    elif config.recompute == "selective":
        plans = [Recompute(selective=True)]
    elif config.recompute == "turn":
        plans = [Recompute(turns, "turn")]
    elif config.recompute == "layer":
        plans = [Recompute(turns, "layer", dual)]
    else:
        duals = (False, True) if layers and dual else (False,)
        ways = [Recompute(dual=again, selective=s) for again in duals for s in (False, True)]
        plans = list(ways)
        for count in range(1, turns + 1):
            plans += [way._replace(turns=count) for way in ways]
            plans += [way._replace(turns=count, per="layer") for way in ways if layers]
    choices = [Choice(plan, peak(activations, plan, turns, penalised), budget) for plan in plans]
    fitting = [choice for choice in choices if choice.fits]

    def cost(choice: Choice) -> float:
        return extra_turns(choice.recompute, turns, dual)

    if fitting:
        return min(fitting, key=lambda choice: (cost(choice), choice.peak))
    return min(choices, key=lambda choice: (choice.peak, cost(choice)))


def extra_turns(recompute: Recompute, turns: int, dual: bool) -> float:
    """Extra time of a step of `turns` turns in the graph, in turns run forward; `dual` says whether
    it has a dual turn."""
    again = min(recompute.turns, turns)
    kept = turns - again + DUAL_COST * (dual and not recompute.dual)
    return again + DUAL_COST * recompute.dual + SELECTIVE_COST * kept * recompute.selective


def _known(size: int | None) -> int:
    if size is None:
        raise ValueError(
            "recompute: expected auto, none or turn where the layers of the block are not known, "
            "got layer"
        )
    return size


def gib(size: int) -> str:
    """Bytes in GiB, for people."""
    return f"{size / GIB:.2f} GiB"
