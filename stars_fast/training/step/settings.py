"""The part of a run's configuration that its penalty and its turns follow."""

from typing import Protocol

from stars_fast.training.step.loop_config import LoopChange
from stars_fast.training.step.penalty import PenaltyConfig


class LoopSettings(Protocol):
    """Read of `LoopConfig`."""

    @property
    def accumulation(self) -> int: ...

    @property
    def backprop_turns(self) -> int | None: ...


class StepSettings(Protocol):
    """Read of `RunConfig`, which itself takes the choices of `method` from the penalties."""

    @property
    def method(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def precision(self) -> str: ...

    @property
    def penalty(self) -> PenaltyConfig: ...

    @property
    def loop(self) -> LoopChange: ...

    @property
    def train(self) -> LoopSettings: ...
