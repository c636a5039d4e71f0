"""One micro-batch on its way through the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from stars_fast.base.seeds import derive
from stars_fast.data.batches import MicroBatch
from stars_fast.data.samples import sample_noise, seeded_noise
from stars_fast.models.loop import Loop, Start, Turn
from stars_fast.tokens import Subset, Tokens
from stars_fast.training.step.settings import StepSettings
from stars_fast.training.step.turns import (
    KEEP_ALL,
    Recompute,
    TurnByLayer,
    by_layer,
    dual_turn,
    run_turns,
)

Noise = Callable[[Tensor], Tensor]
"""Noise of the shape, dtype and device of a state."""


def begin(
    loop: Loop, batch: MicroBatch, precision: str, seeds: Sequence[int] | None = None
) -> Start:
    """h^(0) and the inputs of the turns, in the dtype that the turns compute in; `seeds` as in
    `Loop.begin`."""
    start = loop.begin(batch.tokens, batch.samples, seeds)
    return start.to(torch.bfloat16) if precision == "mixed" else start


class MicroStep:
    """A micro-batch with all that its turns and its penalty are made from.

    Args:
        start: what `begin` gives; made here by default.
        noise: of the penalty's direction; by default a function of the seed, step and sample.

    Attributes:
        loop, batch, config, step, recompute: the arguments; `step` is the number of the step.
        first: h^(0) [B, S, D].
        inputs: [B, S, D], what every turn takes in besides the state; None where that is nothing.
        turn: one turn of the whole batch.
        in_graph: the turns in the graph that `turns` has run.
    """

    def __init__(
        self,
        loop: Loop,
        batch: MicroBatch,
        config: StepSettings,
        step: int,
        recompute: Recompute = KEEP_ALL,
        start: Start | None = None,
        noise: Noise | None = None,
    ) -> None:
        self.loop = loop
        self.batch = batch
        self.config = config
        self.step = step
        self.recompute = recompute
        self._noise = noise
        if start is None:
            # By the samples' numbers, so that they do not depend on how the step is split.
            numbers = range(batch.first, batch.first + batch.samples.count)
            seeds = [derive(config.seed, "state", step, number) for number in numbers]
            start = begin(loop, batch, config.precision, seeds)
        self.first, self.inputs = start
        self.in_graph = 0

    @cached_property
    def turn(self) -> Turn:
        return self.loop.turn(self.first, self.batch.samples, self.inputs)

    @cached_property
    def _layered(self) -> TurnByLayer | None:
        return by_layer(self.turn, self.loop.model) if self.recompute.turns else None

    def noise(self, h: Tensor, samples: Tokens, chosen: Iterable[int] | None = None) -> Tensor:
        """Normal noise of the shape, dtype and device of h [B, S, D] for the penalty's direction:
        of these `samples`, which are all of the batch or those `chosen` from it."""
        if self._noise is not None:
            return self._noise(h)
        chosen = range(samples.count) if chosen is None else chosen
        numbers = [self.batch.first + i for i in chosen]
        return sample_noise(h, samples, self.config.seed, self.step, numbers)

    def turns(self, number: int, run_later: int = 0) -> list[Tensor]:
        """The states [B, S, D] of the first `number` turns that are in the graph, h^(0) or later to
        h^(number); `run_later` of the turns that carry a gradient follow them, from the last."""
        kept = self.config.train.backprop_turns
        noisy = self.config.loop.noise > 0
        states = run_turns(
            self.turn,
            self.first,
            number,
            None if kept is None else kept - run_later,
            self.recompute,
            self._layered,
            self.disturbed if noisy else None,
        )
        self.in_graph = len(states) - 1
        if run_later and noisy:
            states[-1] = self.disturbed(states[-1], number)
        return states

    def further(self, h: Tensor, number: int, free: int = 0) -> Tensor:
        """The state after `free` turns from h without a graph and `number` in it, which follow
        those of `turns` in what is recomputed."""
        left = max(self.recompute.turns - self.in_graph, 0)
        recompute = self.recompute._replace(turns=left)
        return run_turns(self.turn, h, free + number, number, recompute, self._layered)[-1]

    def disturbed(self, h: Tensor, turn: int) -> Tensor:
        """The state h [B, S, D] with the noise of `loop.noise` before the turn of that number."""
        seed, step, first = self.config.seed, self.step, self.batch.first
        samples = self.batch.samples
        numbers = range(first, first + samples.count)
        seeds = [derive(seed, "state noise", step, turn, number) for number in numbers]
        size = rms(h.detach())
        noise = size * seeded_noise(size.expand(h.shape), samples, seeds)
        return h + (self.config.loop.noise * noise).to(h.dtype)

    def turn_of(self, part: Subset, h: Tensor) -> Turn:
        """One turn of some of the samples, whose state is h."""
        inputs = None if self.inputs is None else part.cut(self.inputs)
        return self.loop.turn(h, part.tokens, inputs)

    def dual_turn(self, turn: Turn) -> Turn:
        """`turn`, this batch's or one of a part of it, to take the Jacobian of; with its layers
        recomputed if the dual turn's are."""
        layered = by_layer(turn, self.loop.model) if self.recompute.dual else None
        return dual_turn(turn, self.recompute, layered)


def rms(h: Tensor) -> Tensor:
    """The root mean square of each token's state, h [B, S, D] -> [B, S, 1], fp32 at least."""
    return h.to(torch.promote_types(h.dtype, torch.float32)).square().mean(-1, keepdim=True).sqrt()
