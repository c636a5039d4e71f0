"""The penalty of a step as an object, and the methods that have none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stars_fast.data.batches import MicroBatch
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.penalty import PenaltyConfig
from stars_fast.training.step.settings import StepSettings


class Penalty(ABC):
    """The term R of `(1 - lambda) L + lambda R`, made once for a run; lambda itself follows
    `config.penalty`.

    Attributes:
        needs_dual: whether `compute` runs a dual turn, for which memory is kept.
        last_turns: how many of the last turns `compute` runs itself, rather than the step.
        more_turns: plain turns that `compute` runs in the graph beyond those of the step.
        can_collapse: whether it goes to zero when the block forgets its input, of which the run
            then warns.
    """

    needs_dual: ClassVar[bool] = False
    last_turns: ClassVar[int] = 0
    more_turns: ClassVar[int] = 0
    can_collapse: ClassVar[bool] = False

    def __init__(self, config: StepSettings) -> None:
        self.config = config

    @abstractmethod
    def compute(self, micro: MicroStep, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return h^(t) [B, S, D] and the penalty, a mean over the samples, a scalar.

        `states` are those in the graph before the last `last_turns` turns, each [B, S, D]; without
        such turns h^(t) is the last of them.
        """

    def cost(self) -> float:
        """The cost for one micro-batch, in turns, beyond the turns that the step has anyway."""
        return 0.0

    def factor(self, batch: MicroBatch, step: int) -> float:
        """The number that the micro-batch's penalty counts for; with 0 it is not computed."""
        return 1.0

    def as_drawn(self, samples: float) -> PenaltyConfig:
        """The settings with what holds in truth for micro-batches of so many samples on average."""
        return self.config.penalty

    def warnings(self, samples: float) -> list[str]:
        """Lines on what is other than asked for, for micro-batches of so many samples."""
        return []


class NoPenalty(Penalty):
    """A penalty of zero."""

    def compute(self, micro: MicroStep, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        h = states[-1]
        return h, h.new_zeros((), dtype=torch.float32)


class Method(NamedTuple):
    """A training method: what the number of turns follows, and which penalty there is.

    fixed_depth: True or False if the method says which, None if the recipe chooses.
    penalty: makes the penalty of a run from its configuration.
    summary: one line for messages and help.
    backprop_turns: the turns that carry a gradient, where that is what the method is.
    """

    fixed_depth: bool | None
    penalty: Callable[[StepSettings], Penalty]
    summary: str
    backprop_turns: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether there is a penalty."""
        return self.penalty is not NoPenalty


METHODS = {
    "sft": Method(True, NoPenalty, "token loss at a fixed number of turns"),
    "random-loop": Method(False, NoPenalty, "token loss, the number of turns drawn from a law"),
    "one-step": Method(
        None,
        NoPenalty,
        "token loss, its gradient through the last turn alone: a fixed point's to first order",
        backprop_turns=1,
    ),
}
