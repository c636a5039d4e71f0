"""The terminal fixed-point loss: how far the last state is from one that a turn leaves as it is.

    ||Phi(h) - h||^2 / ||Phi(h)||^2        per sample, the denominator cut off from the graph

    "next"   h = h^(t), in one further turn
    "last"   h = h^(t-1), in the last turn, which is there anyway

After arXiv 2608.18222. Beside the Jacobian penalty it is `penalty.fixed_point`, where the dual turn
gives Phi(h).
"""

from __future__ import annotations

from torch import Tensor

from stars_fast.ops.sample_norms import sample_norms
from stars_fast.tokens import Tokens
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.penalties.base import Method, Penalty
from stars_fast.training.step.settings import StepSettings


class FixedPointAtNext(Penalty):
    """The relative step that one further turn from h^(t) takes."""

    more_turns = 1

    def compute(self, micro: MicroStep, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        h = states[-1].detach() if self.config.penalty.detach else states[-1]
        return states[-1], relative_step(h, micro.further(h, 1), micro.batch.samples)

    def cost(self) -> float:
        return 1.0


class FixedPointAtLast(Penalty):
    """The relative step that the last turn has taken."""

    def compute(self, micro: MicroStep, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        return states[-1], relative_step(states[-2], states[-1], micro.batch.samples)


def fixed_point_penalty(config: StepSettings) -> Penalty:
    """The terminal fixed-point loss at the state that the settings say."""
    return FixedPointAtLast(config) if config.penalty.at == "last" else FixedPointAtNext(config)


def relative_step(before: Tensor, after: Tensor, samples: Tokens) -> Tensor:
    """Mean over the samples of ||after - before||^2 / ||after||^2 over their real tokens, a scalar;
    `before` and `after` [B, S, D]."""
    mask = samples.real
    mask = None if mask is None else mask.to(after.device, non_blocking=True)
    norms = sample_norms(after, mask, samples.cu_seqlens)
    return norms.relative_square(after - before, after.detach())


METHODS = {
    "fixed-point": Method(
        None, fixed_point_penalty, "the relative step of a turn from the last state as penalty"
    ),
}
