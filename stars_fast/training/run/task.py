"""What a run trains, on what, and how it is judged: what tasks of the trainer differ in."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import nn

from stars_fast.base.run_folder import RunFolder
from stars_fast.data.batches import Source
from stars_fast.models.loop import Loop

Results = dict[str, dict[int, float]]
"""Figures by number of turns, by name: {"accuracy": {4: 0.98, 8: 0.97}}."""


class Task(Protocol):
    """Attributes:
    loop: the model.
    source: the training data.
    guessing: the token loss of a uniform guess, in nats.
    """

    loop: Loop
    source: Source
    guessing: float

    @property
    def title(self) -> str:
        """The model, for the banner."""
        ...

    def describe(self, samples: int, tokens: int) -> str:
        """What a step's batch is made of, for the banner."""
        ...

    def notes(self) -> list[str]:
        """More to say of the data and the model at the start."""
        ...

    def write(self, folder: RunFolder) -> None:
        """Write to the run folder what is needed beside weights; the first process calls it."""
        ...

    def evaluate(self, step_loss: nn.Module, say: Callable[[str], None]) -> Results:
        """Judge the model; every process calls it, and the first gets the results. `step_loss` is
        the `StepLoss` of the loop, perhaps made parallel; `say` tells people what went wrong."""
        ...

    def tell(self, results: Results) -> list[str]:
        """The results at the end of the run, for people."""
        ...

    def draw(self, results: Results, folder: Path) -> None:
        """Figures of the results."""
        ...
