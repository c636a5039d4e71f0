"""The ways to train that are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.floors import Passes
from stars_fast.training.step.methods import METHODS


@dataclass(frozen=True)
class StepCase:
    """A way to train.

    method: one of the trainer's. published: the published way, or ours. checkpointed: whether the
    published way computes each layer again in the backward. penalty: fields of ours that are not
    the default's. paper: its time over SFT as the paper has it.
    """

    method: str
    published: bool = False
    checkpointed: bool = True
    penalty: dict[str, Any] = field(default_factory=dict)
    paper: float | None = None

    @property
    def random_depth(self) -> bool:
        return not METHODS[self.method].fixed_depth

    @property
    def penalised(self) -> bool:
        return METHODS[self.method].penalised


PAPER = {"sft": 1.0, "random-loop": 1.4976, "jsrr": 1.5317, "stars": 2.0439}
LAST = {"at": "last", "detach": False}
QUARTER = {"fraction": 0.25}
MICRO = {"fraction": 0.25, "draw": "micro-batches"}
PENALTIES: dict[str, dict[str, Any]] = {
    "": {},
    "-last": LAST,
    "-quarter": QUARTER,
    "-quarter-micro": MICRO,
    "-last-quarter": LAST | QUARTER,
    "-last-quarter-micro": LAST | MICRO,
}
"""quarter is a quarter of the documents of each micro-batch, quarter-micro all those of a quarter
of the micro-batches."""

STEP_CASES = {
    **{
        f"published-{method}": StepCase(method, published=True, paper=paper)
        for method, paper in PAPER.items()
    },
    "published-sft-kept": StepCase("sft", published=True, checkpointed=False),
    "sft": StepCase("sft", paper=PAPER["sft"]),
    "random-loop": StepCase("random-loop", paper=PAPER["random-loop"]),
    **{
        method + ending: StepCase(method, penalty=penalty, paper=None if penalty else PAPER[method])
        for method in ("jsrr", "stars")
        for ending, penalty in PENALTIES.items()
    },
}


def passes(case: StepCase, recomputed: bool) -> Passes:
    """How a case runs its turns and its penalty; what the published way computes again counts or
    not."""
    if not case.published:
        shared = case.penalty.get("at") == "last"
        return Passes("plain", "dual" if case.penalised else None, shared)
    again = recomputed and case.checkpointed
    penalty = "double_backward, recomputed" if again else "double_backward"
    return Passes("recomputed" if again else "plain", penalty if case.penalised else None)
