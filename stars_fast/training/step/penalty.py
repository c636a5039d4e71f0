"""The penalty of a step: its settings, the schedule of its weight, and the weighted sum.

The objective is the paper's `(1 - lambda) L + lambda R` (main text) or `L + lambda R`
(Algorithm 1). R is one of those in `penalties/`.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from stars_fast.base.checks import check_number, check_types


@dataclass
class PenaltyConfig:
    """How the penalty enters the loss; without effect for methods that have none.

    weight: lambda, once the start and the ramp are over.
    weighting: convex for (1 - lambda) L + lambda R, additive for L + lambda R.
    start_step: first step with the penalty; before it lambda is 0 and the pass is saved.
    ramp_steps: steps over which lambda rises linearly to weight.
    normalize: v has unit norm per sample, or over the whole micro-batch as in the published code.
    power_steps: applications of the Jacobian; 1 as in the paper.
    detach: stop the penalty's gradient at the state where the Jacobian is taken.
    at: next for the Jacobian at h^(t), one further turn, as in the paper; last for that at h^(t-1),
        which shares the last turn's pass and costs less, with detach false.
    fraction: of the samples of a step, drawn anew each time, that the Jacobian penalty is taken of;
        unbiased.
    draw: what the fraction is drawn from: samples for so many of each micro-batch; micro-batches
        for all samples of so many of the micro-batches, which costs nothing but their dual turns.
    direction: of v: random, or step for the last step of the state, h^(t) - h^(t-1), which has been
        through the Jacobians of the turns before. The value then no longer estimates
        ||J||_F^2 / D: it leans to the largest singular values and eigenvalues of J, and it is 0 for
        a sample whose state no longer moves.
    margin: m of the hinge max(0, ||J v|| - m)^2 in the place of ||J v||^2: no pressure where the
        map shrinks v to m or less.
    fixed_point: c of c ||Phi(h) - h||^2 / ||Phi(h)||^2, the loss of method fixed-point, added to
        the Jacobian penalty; the dual turn has Phi(h) anyway.
    """

    weight: float = 0.1
    weighting: Literal["convex", "additive"] = "convex"
    start_step: int = 0
    ramp_steps: int = 0
    normalize: Literal["sample", "batch"] = "sample"
    power_steps: int = 1
    detach: bool = True
    at: Literal["next", "last"] = "next"
    fraction: float = 1.0
    draw: Literal["samples", "micro-batches"] = "samples"
    direction: Literal["random", "step"] = "random"
    margin: float = 0.0
    fixed_point: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        for name, choices in (
            ("weighting", ("convex", "additive")),
            ("normalize", ("sample", "batch")),
            ("at", ("next", "last")),
            ("draw", ("samples", "micro-batches")),
            ("direction", ("random", "step")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {choices}, got {getattr(self, name)!r}")
        for name, low in (("start_step", 0), ("ramp_steps", 0), ("power_steps", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}: expected at least {low}, got {getattr(self, name)}")
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction: expected a value in (0, 1], got {self.fraction}")
        for name in ("margin", "fixed_point"):
            check_number(name, getattr(self, name), 0.0)
        if self.at == "last" and self.detach:
            raise ValueError(
                "detach: expected false with at=last: one pass can't cut the state off for the "
                "penalty and keep it connected for the token loss"
            )
        if self.weight < 0 or (self.weighting == "convex" and self.weight > 1):
            raise ValueError(
                f"weight: expected >= 0, and <= 1 with convex weighting, got {self.weight}"
            )

    def micro_batches(self, window: int) -> int:
        """How many of the `window` micro-batches of a step have the penalty.

        Raises:
            ValueError: the fraction is drawn from them and is not a whole number of them.
        """
        if self.draw == "samples":
            return window
        number = round(self.fraction * window)
        if number < 1 or abs(number - self.fraction * window) > 1e-6:
            raise ValueError(
                f"fraction: expected a whole number of the {window} micro-batches of a step "
                f"(train.accumulation) with draw micro-batches, got {self.fraction:g}"
            )
        return number

    def weight_at(self, step: int) -> float:
        """lambda at `step` (counted from 0)."""
        if step < self.start_step:
            return 0.0
        if not self.ramp_steps:
            return self.weight
        return self.weight * min(1.0, (step - self.start_step + 1) / self.ramp_steps)

    def combine(self, loss: Tensor, penalty: Tensor, weight: float) -> Tensor:
        """The weighted sum of token loss and penalty for lambda = weight."""
        kept = 1.0 - weight if self.weighting == "convex" else 1.0
        return kept * loss + weight * penalty
