"""The micro-batches of a step: which samples, and on which rank, as a function of the step."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stars_fast.base.seeds import derive
from stars_fast.data import IGNORE
from stars_fast.tokens import Tokens


class HostBatch(NamedTuple):
    """Some units of a source, on the host: tokens [B, S] int64, targets [B, S] int64 (the next
    token, `IGNORE` where there is no loss), and the samples they are."""

    tokens: Tensor
    targets: Tensor
    samples: Tokens


Fill = Callable[[HostBatch], HostBatch]
"""Adds pads to a batch."""


class Source(Protocol):
    """Training data as the trainer asks for it.

    A unit is what a step has `batch_size` of: a sample, or a row of packed documents. `longest` is
    the most tokens of one.
    """

    @property
    def longest(self) -> int: ...

    def __len__(self) -> int:
        """Units."""
        ...

    def count(self, units: np.ndarray) -> np.ndarray:
        """Samples in each of `units` [n] int64."""
        ...

    def batch(self, units: np.ndarray) -> HostBatch:
        """`units` [n] int64, in this order."""
        ...

    def fingerprint(self) -> int:
        """A checksum of all the data: a run does not go on with other data."""
        ...

    def largest_token(self) -> int:
        """The largest id of a token."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on its device.

    tokens: [B, S] int64.
    positions: [N] int64, the supervised places in [B * S].
    labels: [N] int64, their targets.
    samples: which tokens are whose, on the host.
    first: the place of its first sample in the batch of the whole step.
    step_samples: samples of the whole step.
    step_micro_batches: micro-batches of the whole step.
    index: its own number among those.
    real_tokens: tokens that are not padding.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    samples: Tokens
    first: int
    step_samples: int
    step_micro_batches: int
    index: int
    real_tokens: int

    @property
    def share(self) -> float:
        """Its part of the step's samples."""
        return self.samples.count / self.step_samples


class Batches:
    """The windows of micro-batches of one rank.

    The batch of a step is a function of (seed, step). It is cut into accumulation * world_size
    micro-batches in order, and rank r takes every world_size-th from the r-th on, so that the
    samples of a step do not depend on the split.

    Attributes:
        fill: how each micro-batch is filled up with pads; None to leave it as the source gives it.

    Raises:
        ValueError: `batch_size` does not divide evenly.
    """

    def __init__(
        self,
        source: Source,
        seed: int,
        batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        fill: Fill | None = None,
    ) -> None:
        self.total = accumulation * world_size
        if batch_size % self.total:
            raise ValueError(
                f"batch_size: expected a multiple of accumulation x processes = {accumulation} x "
                f"{world_size}, got {batch_size}"
            )
        self.source = source
        self.seed = derive(seed, "order")
        self.batch_size = batch_size
        self.rows = batch_size // self.total
        self.indices = range(rank, self.total, world_size)
        self.device = device or torch.device("cpu")
        self.fill = fill

    @property
    def most_tokens(self) -> int:
        """The most tokens that a micro-batch can have, pads included."""
        return self.rows * self.source.longest

    def host_window(self, step: int) -> list[MicroBatch]:
        """The micro-batches of this rank for `step`, on the host."""
        units = batch_indices(self.seed, step, self.batch_size, len(self.source)).numpy()
        before = np.concatenate([[0], np.cumsum(self.source.count(units))])
        return [self._micro(units, before, index) for index in self.indices]

    def _micro(self, units: np.ndarray, before: np.ndarray, index: int) -> MicroBatch:
        first = index * self.rows
        return micro_batch(
            self.source,
            units[first : first + self.rows],
            first=int(before[first]),
            step_samples=int(before[-1]),
            step_micro_batches=self.total,
            index=index,
            fill=self.fill,
        )

    def window(self, step: int) -> list[MicroBatch]:
        """The micro-batches of this rank for `step`, on its device."""
        return [to_device(micro, self.device) for micro in self.host_window(step)]


def micro_batch(
    source: Source,
    units: np.ndarray,
    *,
    first: int = 0,
    step_samples: int | None = None,
    step_micro_batches: int = 1,
    index: int = 0,
    fill: Fill | None = None,
) -> MicroBatch:
    """The micro-batch of `units` of a source, on the host; by default it is a whole step."""
    host = source.batch(units)
    tokens, targets, samples = host if fill is None else fill(host)
    flat = targets.flatten()
    positions = (flat != IGNORE).nonzero().squeeze(1)
    return MicroBatch(
        tokens=tokens,
        positions=positions,
        labels=flat[positions],
        samples=samples,
        first=first,
        step_samples=samples.count if step_samples is None else step_samples,
        step_micro_batches=step_micro_batches,
        index=index,
        real_tokens=tokens.numel() if samples.real is None else int(samples.real.sum()),
    )


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same with its tokens, positions and labels on `device`, copied without waiting."""
    if device.type == "cpu":
        return batch

    def move(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    return replace(
        batch,
        tokens=move(batch.tokens),
        positions=move(batch.positions),
        labels=move(batch.labels),
        samples=batch.samples.pinned(),
    )


class Prefetch:
    """The windows of a run, each made in a thread while the step before it runs."""

    def __init__(self, batches: Batches, step: int, steps: int) -> None:
        self._batches = batches
        self._steps = steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[list[MicroBatch]]] | None = None
        self._order(step)

    def _order(self, step: int) -> None:
        if step < self._steps:
            self._next = step, self._thread.submit(self._batches.window, step)

    def window(self, step: int) -> list[MicroBatch]:
        """The micro-batches of `step`; the steps come one after the other."""
        assert self._next is not None
        assert self._next[0] == step, (self._next[0], step)
        window = self._next[1].result()
        self._order(step + 1)
        return window

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def batch_indices(seed: int, step: int, batch_size: int, n: int) -> Tensor:
    """Indices [batch_size] int64 of the units of optimiser step `step`, out of 0..n-1.

    A pure function of its arguments, so a resumed run goes on with the samples that it would have
    had. The batches are cut one after the other from an endless row of epochs, each epoch a
    permutation of 0..n-1 that depends on (seed, epoch) alone: a unit comes once an epoch, and a
    batch may straddle two. `batch_size` is that of a whole step over all ranks; micro-batch and
    rank take their slice of the result.

    Raises:
        ValueError: `seed` or `step` is negative or `batch_size` or `n` not positive.
    """
    for name, value, low in (
        ("seed", seed, 0),
        ("step", step, 0),
        ("batch_size", batch_size, 1),
        ("n", n, 1),
    ):
        if value < low:
            raise ValueError(f"{name}: expected >= {low}, got {value}")
    place, end = step * batch_size, (step + 1) * batch_size
    parts = []
    while place < end:
        epoch, offset = divmod(place, n)
        part = _epoch_order(seed, epoch, n)[offset : offset + end - place]
        parts.append(part)
        place += len(part)
    return torch.from_numpy(np.concatenate(parts))


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)
