"""The options of a sweep over models, turns and tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stars_fast.evaluation.recording import Sampling
from stars_fast.models.adaptive import Per

TEMPERATURE = 0.6
"""The default of samples."""


@dataclass(frozen=True)
class SweepOptions:
    """models: run folders and checkpoints. tasks, data, cap, shots: as `benchmarks.open_tasks`.
    tols: 0 for all turns. tol_per: what rests by itself, a sequence or a token. limit: samples of a
    task; none for all. chat: through the tokenizer's chat template. system: message in front of
    it. step: of a run. batch_size: by default the backend's. backend: native, vllm, or both for
    vllm where it knows the model. samples: of each prompt, at `temperature`; none for one greedy
    generation."""

    models: Sequence[str]
    tasks: Sequence[str]
    turns: Sequence[int]
    tols: Sequence[float] = (0.0,)
    tol_per: Per = "sequence"
    limit: int | None = None
    batch_size: int | None = None
    dtype: str | None = None
    device: str | None = None
    data: str | None = None
    backend: str = "native"
    out: str | None = None
    chat: bool = True
    system: str | None = None
    shots: int | None = None
    cap: int = 2048
    step: int | None = None
    samples: int | None = None
    temperature: float | None = None

    @property
    def backends(self) -> list[str]:
        """Their names."""
        return self.backend.split(",")

    @property
    def sampling(self) -> Sampling | None:
        """How answers are drawn; None for greedy ones."""
        if self.samples is None:
            return None
        return Sampling(self.samples, self.temperature or TEMPERATURE)
