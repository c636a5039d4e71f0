"""Notice a penalty that wins over the task: the Jacobian goes to zero, the token loss does not.

A block that forgets its input has no Jacobian and no penalty. A penalty that is too strong drives
a trained model there, and its token loss rises; one that comes before the task is learned keeps a
new model there, and its token loss stays near that of guessing.
"""

from typing import Any

SMOOTHING = 0.7
"""Weight of the past in the running means, per line of metrics."""
GONE = 0.05
"""The penalty is gone below this share of its first value."""
RISEN = 1.25
"""The token loss has risen above this multiple of its lowest since the penalty began, ..."""
NOISE = 0.01
"""... and by this share of guessing: the loss of a learned task is small and jumps."""
STALLED = 0.4
"""The token loss is near guessing above this share of it, ..."""
COLLAPSE_STEPS = 5
"""... once it has been so for this many lines with the penalty gone."""


class CollapseMonitor:
    """Watches token loss and penalty from the first line of metrics with the penalty on.

    `guessing` is the token loss of a uniform guess, the logarithm of the vocabulary's size.
    """

    def __init__(self, guessing: float) -> None:
        self.guessing = guessing
        self.loss: float | None = None
        self.lowest: float | None = None
        self.penalty: float | None = None
        self.first: float | None = None
        self.stalled = 0
        self.collapsed = False

    def check(self, loss: float | None, penalty: float | None) -> str | None:
        """Take in one line of metrics; a message if the penalty has just collapsed the model.

        One message an event: after a recovery there can be another.
        """
        if loss is not None:
            self.loss = _smooth(self.loss, loss)
        if penalty is None or self.loss is None:
            return None
        self.penalty = _smooth(self.penalty, penalty)
        self.first = penalty if self.first is None else self.first
        self.lowest = self.loss if self.lowest is None else min(self.lowest, self.loss)

        gone = self.penalty < GONE * self.first
        risen = self.loss > RISEN * self.lowest + NOISE * self.guessing
        near_guessing = self.loss > STALLED * self.guessing
        self.stalled = self.stalled + 1 if gone and near_guessing else 0
        before = self.collapsed
        self.collapsed = gone and (risen or self.stalled >= COLLAPSE_STEPS)
        if before or not self.collapsed:
            return None
        what = (
            f"rose from {self.lowest:.3g} to {self.loss:.3g}"
            if risen
            else f"stays at {self.loss:.3g} (guessing gives {self.guessing:.3g})"
        )
        return (
            f"the penalty is collapsing the model: the Jacobian estimate fell from "
            f"{self.first:.3g} to {self.penalty:.3g} while the token loss {what}. Lower "
            f"penalty.weight, or start it once the task is learned (penalty.start_step, "
            f"penalty.ramp_steps)"
        )

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return dict(vars(self))

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        vars(self).update(state)


def _smooth(mean: float | None, value: float) -> float:
    return value if mean is None else SMOOTHING * mean + (1 - SMOOTHING) * value
