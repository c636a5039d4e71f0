"""The micro-batches of a step: which samples, and on which rank, as a function of the step."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stars_fast.data.addition import IGNORE, Batch, batch_indices
from stars_fast.training.seeds import derive


class Data(Protocol):
    """What the trainer asks of a data set: the number of training samples, and batches of them."""

    @property
    def train(self) -> Tensor: ...

    def batch(self, split: str, indices: Tensor) -> Batch: ...


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on its device.

    tokens [B, S] int64; mask [B, S] bool, True at real tokens, None if all are; positions [N]
    int64, the supervised places in [B * S]; labels [N] int64, their targets. first: the place of
    row 0 in the batch of the whole step; index: that of the micro-batch. real_tokens: tokens that
    are not padding.
    """

    tokens: Tensor
    mask: Tensor | None
    positions: Tensor
    labels: Tensor
    first: int
    index: int
    real_tokens: int


class Batches:
    """The windows of micro-batches of one rank.

    The batch of a step is a function of (seed, step). It is cut into accumulation * world_size
    micro-batches in order, and rank r takes every world_size-th from the r-th on, so that the
    samples of a step do not depend on the split.

    Raises ValueError if `batch_size` does not divide evenly.
    """

    def __init__(
        self,
        data: Data,
        seed: int,
        batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
    ) -> None:
        pieces = accumulation * world_size
        if batch_size % pieces:
            raise ValueError(
                f"batch_size must be a multiple of accumulation x processes = {accumulation} x "
                f"{world_size}, got {batch_size}"
            )
        self.data = data
        self.seed = derive(seed, "order")
        self.batch_size = batch_size
        self.rows = batch_size // pieces
        self.pieces = range(rank, pieces, world_size)
        self.device = device or torch.device("cpu")

    def window(self, step: int) -> list[MicroBatch]:
        """The micro-batches of this rank for `step`."""
        indices = batch_indices(self.seed, step, self.batch_size, len(self.data.train))
        return [self._micro(indices, piece) for piece in self.pieces]

    def _micro(self, indices: Tensor, piece: int) -> MicroBatch:
        first = piece * self.rows
        tokens, targets, mask = self.data.batch("train", indices[first : first + self.rows])
        # Counted and gathered before the move: on the device either would wait for it.
        flat = targets.flatten()
        positions = (flat != IGNORE).nonzero().squeeze(1)
        real = int(mask.sum())

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, non_blocking=True)

        return MicroBatch(
            tokens=move(tokens),
            mask=None if real == mask.numel() else move(mask),
            positions=move(positions),
            labels=move(flat[positions]),
            first=first,
            index=piece,
            real_tokens=real,
        )
