"""Notice a penalty that wins over the task: the Jacobian goes to zero while the token loss rises.

A block that forgets its input has no Jacobian and no penalty; a penalty that is too strong, or
that comes before the task is learned, can drive it there.
"""

from typing import Any

SMOOTHING = 0.7
"""Weight of the past in the running means, per line of metrics."""
GONE = 0.05
"""The penalty has collapsed below this share of its first value."""
RISEN = 1.25
"""The token loss has risen above this multiple of the lowest since the penalty began."""


class CollapseMonitor:
    """Watches token loss and penalty from the first line with a penalty on.

    `check` answers once per event: a run that recovers can be warned again.
    """

    def __init__(self) -> None:
        self.loss: float | None = None
        self.lowest: float | None = None
        self.penalty: float | None = None
        self.first: float | None = None
        self.collapsed = False

    def check(self, loss: float | None, penalty: float | None) -> str | None:
        """Take in one line of metrics; a message if the penalty has just collapsed the model."""
        if loss is not None:
            self.loss = _smooth(self.loss, loss)
        if penalty is None or self.loss is None:
            return None
        self.penalty = _smooth(self.penalty, penalty)
        self.first = penalty if self.first is None else self.first
        self.lowest = self.loss if self.lowest is None else min(self.lowest, self.loss)
        gone = self.penalty < GONE * self.first
        risen = self.loss > RISEN * self.lowest
        before, self.collapsed = self.collapsed, gone and risen
        if before or not self.collapsed:
            return None
        return (
            f"the penalty is collapsing the model: the Jacobian estimate fell from "
            f"{self.first:.3g} to {self.penalty:.3g} while the token loss rose from "
            f"{self.lowest:.3g} to {self.loss:.3g}. Lower penalty.weight, or start it later "
            f"(penalty.start_step, penalty.ramp_steps), once the task is learned"
        )

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return dict(vars(self))

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        vars(self).update(state)


def _smooth(mean: float | None, value: float) -> float:
    return value if mean is None else SMOOTHING * mean + (1 - SMOOTHING) * value
