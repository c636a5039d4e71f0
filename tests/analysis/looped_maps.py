"""Looped models whose motion is known: any map as the block, on states that are drawn anew."""

import numpy as np
import torch
from torch import nn

from stars_fast.analysis.subjects import Subject
from stars_fast.data.batches import HostBatch, micro_batch
from stars_fast.models.loop import Loop
from stars_fast.tokens import padded_tokens


class MapLoop(Loop):
    """`block` as the turn; tokens are embedded at random, and their loss is the mean square."""

    def __init__(self, block, width):
        super().__init__()
        self.block = block
        torch.manual_seed(0)
        self.model = nn.Embedding(50, width)

    def prelude(self, tokens):
        return self.model(tokens)

    def turn(self, h, samples, inputs=None):
        return self.block

    def token_loss(self, h, batch, count):
        rows = h.flatten(0, 1).index_select(0, batch.positions)
        return rows.square().mean(1).sum() / count

    logits = layers = outside_block = turn_flops = vocabulary = None


class Drawn:
    """Rows of random tokens, padded on the right to `length`."""

    def __init__(self, lengths):
        self.lengths = torch.tensor(lengths)

    def batch(self, units):
        length = int(self.lengths.max())
        tokens = torch.randint(50, (len(units), length), generator=torch.manual_seed(1))
        mask = torch.arange(length) < self.lengths[units][:, None]
        return HostBatch(tokens, tokens.masked_fill(~mask, -100), padded_tokens(mask))


def subject(block, width=6, lengths=(3, 4, 4, 2), name="map", trained=4):
    """Its samples in two batches, if there are two."""
    source = Drawn(lengths)
    halves = np.array_split(np.arange(len(lengths)), min(2, len(lengths)))
    batches = [micro_batch(source, half) for half in halves]
    loop = MapLoop(block, width)
    return Subject(name, name, "a map", lambda: loop, batches, trained)


def rotation(angle, width=6, growth=1.0):
    """Turns the first two coordinates by `angle`, halves the others; all times `growth`."""
    matrix = 0.5 * torch.eye(width)
    c, s = np.cos(angle), np.sin(angle)
    matrix[:2, :2] = torch.tensor([[c, -s], [s, c]])
    return lambda h: growth * (h @ matrix.T.to(h.dtype))
