"""One micro-batch on its way through the step."""

from __future__ import annotations

import torch
from torch import Tensor

from stars_fast.data.batches import MicroBatch
from stars_fast.models.loop import Loop, Turn
from stars_fast.tokens import Subset
from stars_fast.training.step.settings import StepSettings
from stars_fast.training.step.turns import KEEP_ALL, Recompute, by_layer, dual_turn, run_turns


def prelude_output(loop: Loop, batch: MicroBatch, precision: str) -> Tensor:
    """e [B, S, D], in the dtype that the turns compute in."""
    e = loop.prelude(batch.tokens, batch.samples)
    return e.to(torch.bfloat16) if precision == "mixed" else e


class MicroStep:
    """A micro-batch with all that its turns and its penalty are made from.

    Attributes:
        loop, batch, config, step, recompute: the arguments; `step` is the number of the step.
        e: the prelude's output [B, S, D].
        first: h^(0) [B, S, D].
        turn: one turn of the whole batch.
    """

    def __init__(
        self,
        loop: Loop,
        batch: MicroBatch,
        config: StepSettings,
        step: int,
        recompute: Recompute = KEEP_ALL,
    ) -> None:
        self.loop = loop
        self.batch = batch
        self.config = config
        self.step = step
        self.recompute = recompute
        self.e = prelude_output(loop, batch, config.precision)
        self.first = loop.first_state(self.e, batch.samples)
        self.turn = loop.turn(self.e, batch.samples)

    def turns(self, number: int, run_later: int = 0) -> list[Tensor]:
        """The states [B, S, D] of the first `number` turns that are in the graph, h^(0) or later to
        h^(number); `run_later` of the turns that carry a gradient follow them."""
        kept = self.config.train.backprop_turns
        return run_turns(
            self.turn,
            self.first,
            number,
            None if kept is None else kept - run_later,
            self.recompute,
            by_layer(self.turn, self.loop.model) if self.recompute.turns else None,
        )

    def turn_of(self, part: Subset | None, detach: bool) -> Turn:
        """The turn of a part of the samples, of all where None; with `detach` no gradient reaches
        the prelude through what the turn takes from it."""
        if part is None and not (detach and self.loop.injects):
            return self.turn
        e, samples = self.e, self.batch.samples
        if part is not None:
            e, samples = part.cut(e), part.tokens
        return self.loop.turn(e.detach() if detach else e, samples)

    def dual_turn(self, turn: Turn) -> Turn:
        """`turn`, this batch's or one of a part of it, to take the Jacobian of; with its layers
        recomputed if the dual turn's are."""
        layered = by_layer(turn, self.loop.model) if self.recompute.dual else None
        return dual_turn(turn, self.recompute, layered)
