"""The options of a sweep over turns and tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stars_fast.models.adaptive import Per


@dataclass(frozen=True)
class SweepOptions:
    """models: run folders and checkpoints. tasks, data, cap, shots: as `benchmarks.open_tasks`.
    tols: 0 for all turns. tol_per: what rests by itself, a sequence or a token. limit: samples of a
    task; none for all. chat: through the tokenizer's chat template. system: message in front of
    it. step: of a run. batch_size: by default the backend's."""

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
