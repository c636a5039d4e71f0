"""The Jacobian penalty of a micro-batch: after the last turn, or sharing the last turn's pass.

    "next"   h^(t) -> one more turn, dual: the paper's
    "last"   h^(t-1) -> the last turn, dual: its primal output is h^(t), which saves a turn

With `penalty.fraction` a part of the samples goes through the dual pass, drawn anew each step.
Drawn from the samples it is as many in each micro-batch of each rank (all that there are where it
holds fewer), so that none waits long for another; their mean stands for that over all samples of
the micro-batch, which is its expected value. Drawn from the micro-batches it is all samples of
some, the same ones of the window on every rank, and their penalty counts for the others'.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from stars_fast.base.seeds import derive
from stars_fast.data.batches import MicroBatch
from stars_fast.data.samples import (
    draw_samples,
    drawn_number,
    drawn_part,
)
from stars_fast.jsrr import fused_jsrr
from stars_fast.models.loop import Turn
from stars_fast.tokens import Subset, Tokens, put_together
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.penalties.base import Method, Penalty
from stars_fast.training.step.penalties.fixed_point import relative_step
from stars_fast.training.step.penalty import PenaltyConfig
from stars_fast.training.step.settings import StepSettings

DUAL_TURN = 2.1
"""Cost of a turn that carries a tangent, over a plain one: twice the linear maps, three times
attention's products."""


class _Jacobian(Penalty):
    """Mean over the samples of ||J v||^2, or of its hinge, and perhaps of the relative step."""

    needs_dual = True
    can_collapse = True

    def cost(self) -> float:
        settings = self.config.penalty
        # Power steps before the last carry the tangent forward without a gradient.
        dual = DUAL_TURN * (1 + (settings.power_steps - 1) / 3)
        return settings.fraction * (dual - self.last_turns)

    def factor(self, batch: MicroBatch, step: int) -> float:
        """1, or where micro-batches are drawn their number over that of those drawn, and 0 for the
        others."""
        settings = self.config.penalty
        if settings.draw == "samples":
            return 1.0
        window = self.config.train.accumulation
        number = settings.micro_batches(window)
        seed = derive(self.config.seed, "micro-batches", step)
        chosen = random.Random(seed).sample(range(window), number)
        place = batch.index * window // batch.step_micro_batches
        return window / number if place in chosen else 0.0

    def as_drawn(self, samples: float) -> PenaltyConfig:
        settings = self.config.penalty
        if settings.draw == "micro-batches":
            return settings
        return replace(settings, fraction=drawn_part(settings.fraction, samples))

    def warnings(self, samples: float) -> list[str]:
        asked, part = self.config.penalty.fraction, self.as_drawn(samples).fraction
        if 0.8 < part / asked < 1.25:
            return []
        return [
            f"penalty.fraction is {part:.2f} rather than {asked:g}: of the few samples of a "
            "micro-batch a whole number is drawn, one at least"
        ]

    def drawn(self, batch: MicroBatch, step: int) -> Subset | None:
        """The samples of the micro-batch that go through the dual pass; None for all."""
        settings = self.config.penalty
        if settings.draw == "micro-batches":
            return None
        number = drawn_number(settings.fraction, batch.step_samples / batch.step_micro_batches)
        if settings.fraction == 1.0 or number >= batch.samples.count:
            return None
        chosen = draw_samples(batch.samples.count, number, self.config.seed, step, batch.index)
        return batch.samples.subset(chosen)

    def direction(self, states: list[Tensor]) -> Tensor | None:
        """v [B, S, D] at the last of the `states`, cut off from the graph; None for a random one,
        also where a single state leaves no step to take."""
        if self.config.penalty.direction == "random" or len(states) == 1:
            return None
        return states[-1].detach() - states[-2].detach()

    def asked(
        self, micro: MicroStep, states: list[Tensor], part: Subset | None
    ) -> tuple[Turn, Tensor, Tensor, Tokens, PenaltyConfig]:
        """The arguments of `jacobian_estimate` at the last of the `states`, of the whole batch or
        of a part."""
        h, v, turn = states[-1], self.direction(states), micro.turn
        samples = micro.batch.samples
        chosen: Sequence[int] | None = None
        if part is not None:
            samples, chosen = part.tokens, part.chosen
            h, v = part.cut(h), None if v is None else part.cut(v)
            turn = micro.turn_of(part, h)
        if v is None:
            v = micro.noise(h, samples, chosen)
        return micro.dual_turn(turn), h, v, samples, self.config.penalty


class JacobianAtNext(_Jacobian):
    """||J v||^2 at h^(t), in one further turn."""

    def compute(self, micro: MicroStep, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        part = self.drawn(micro.batch, micro.step)
        return states[-1], jacobian_value(*self.asked(micro, states, part))


class JacobianAtLast(_Jacobian):
    """||J v||^2 at h^(t-1), in the last turn."""

    last_turns = 1

    def compute(self, micro: MicroStep, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        samples, part = micro.batch.samples, self.drawn(micro.batch, micro.step)
        out, penalty = jacobian_estimate(*self.asked(micro, states, part))
        if part is None:
            return out, penalty
        others = samples.subset(sorted(set(range(samples.count)) - set(part.chosen)))
        h = others.cut(states[-1])
        h = micro.dual_turn(micro.turn_of(others, h))(h)
        return put_together([(part, out), (others, h)], states[-1].shape), penalty


def jacobian_penalty(config: StepSettings) -> Penalty:
    """The Jacobian penalty at the state that the settings say."""
    return JacobianAtLast(config) if config.penalty.at == "last" else JacobianAtNext(config)


def jacobian_estimate(
    turn: Turn, h: Tensor, v: Tensor, samples: Tokens, settings: PenaltyConfig
) -> tuple[Tensor, Tensor]:
    """Phi(h) and the penalty of a turn at h [B, S, D] in the direction v [B, S, D], as the settings
    say; with `detach` both are cut off from h."""
    if settings.detach:
        h = h.detach()
    out, value = fused_jsrr(turn, h, v=v, return_output=True, **_options(h, samples, settings))
    if settings.fixed_point > 0:
        value = value + settings.fixed_point * relative_step(h, out, samples)
    return out, value


def jacobian_value(
    turn: Turn, h: Tensor, v: Tensor, samples: Tokens, settings: PenaltyConfig
) -> Tensor:
    """The penalty of `jacobian_estimate` alone: of a linear map that ends the turn the tangent is
    enough then (`dual.recognition.last_map`), unless `fixed_point` asks for Phi(h)."""
    if settings.fixed_point > 0:
        return jacobian_estimate(turn, h, v, samples, settings)[1]
    return fused_jsrr(turn, h, v=v, **_options(h, samples, settings))


def _options(h: Tensor, samples: Tokens, settings: PenaltyConfig) -> dict[str, Any]:
    """Arguments of `fused_jsrr`."""
    mask = samples.real
    return {
        "mask": None if mask is None else mask.to(h.device, non_blocking=True),
        "cu_seqlens": samples.cu_seqlens,
        "power_steps": settings.power_steps,
        "normalize": settings.normalize,
        "detach": settings.detach,
        "margin": settings.margin,
    }


METHODS = {
    "jsrr": Method(
        True, jacobian_penalty, "fixed turns and the Jacobian penalty at the last state"
    ),
    "stars": Method(
        False, jacobian_penalty, "random turns and the Jacobian penalty: the paper's method"
    ),
}
