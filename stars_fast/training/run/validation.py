"""Token loss on held-out data after each of several numbers of turns, in one pass."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from stars_fast.data.batches import MicroBatch, Source, micro_batch, to_device
from stars_fast.models.loop import Loop
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.micro_step import begin
from stars_fast.training.step.train_step import StepLoss


@torch.no_grad()
def validation_losses(
    root: StepLoss,
    source: Source,
    turns: Sequence[int],
    world: World,
    units: int,
    context: AbstractContextManager[None],
) -> dict[int, float]:
    """Mean cross entropy in nats of the targets of `source` after each number of `turns`.

    Every process calls it and takes its part of the data; all get the result. As the turns are
    shared, one pass over the deepest number of turns, read by the head at each number asked for,
    is the whole sweep.

    Args:
        root: the model with its turns and head, perhaps with sharded weights.
        source: the data.
        turns: numbers of turns, 1 or more.
        units: of `source` in a forward pass.
        context: of the forward passes, such as autocast.
    """
    depths = sorted(set(turns))
    was_training = root.training
    root.eval()
    sums = torch.zeros(len(depths) + 1, dtype=torch.float64, device=world.device)
    starts = range(0, len(source), units)
    try:
        with context:
            for first in range(0, len(starts), world.size):
                piece = first + world.rank
                # A process without a piece of its own runs one all the same: sharded weights are
                # gathered by all processes or by none.
                start = starts[piece if piece < len(starts) else 0]
                batch = micro_batch(source, np.arange(start, min(start + units, len(source))))
                losses = root.with_weights(
                    losses_at, to_device(batch, world.device), root.config.precision, depths
                )
                if piece < len(starts):
                    sums[:-1] += losses.double()
                    sums[-1] += len(batch.labels)
    finally:
        root.train(was_training)
    *totals, count = world.sum_(sums).tolist()
    return {depth: total / count for depth, total in zip(depths, totals, strict=True)}


def losses_at(loop: Loop, batch: MicroBatch, precision: str, depths: Sequence[int]) -> Tensor:
    """[n]: summed cross entropy after each of the rising `depths`."""
    h, inputs = begin(loop, batch, precision)
    turn = loop.turn(h, batch.samples, inputs)
    found = []
    for done in range(1, max(depths) + 1):
        h = turn(h)
        if done in depths:
            found.append(loop.token_loss(h, batch, 1))
    return torch.stack(found)
