"""The micro-batches of a step."""

import numpy as np
import pytest
import torch

from stars_fast.data.batches import Batches, HostBatch, Prefetch, batch_indices
from stars_fast.tokens import padded_tokens


class Units:
    """Unit i is the row (i, i, i); of each third one the last token is a pad, and it counts two
    samples."""

    longest = 3

    def __len__(self):
        return 50

    def count(self, units):
        return np.where(units % 3 == 0, 2, 1)

    def batch(self, units):
        tokens = torch.from_numpy(units)[:, None].repeat(1, 3)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 2] = tokens[:, 2] % 3 != 0
        targets = tokens.masked_fill(~mask, -100)
        targets[:, 0] = -100
        return HostBatch(tokens, targets, padded_tokens(mask))


def window(accumulation, world_size, step=3):
    parts = []
    for rank in range(world_size):
        parts += Batches(Units(), 0, 12, accumulation, rank, world_size).window(step)
    return sorted(parts, key=lambda part: part.index)


def test_the_micro_batches_of_a_step_are_its_batch():
    (whole,) = window(1, 1)
    for accumulation, world_size in ((3, 1), (1, 2), (2, 3)):
        parts = window(accumulation, world_size)
        assert [part.index for part in parts] == list(range(accumulation * world_size))
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        assert {part.step_samples for part in parts} == {whole.step_samples}
        counts = [int(Units().count(part.tokens[:, 0].numpy()).sum()) for part in parts]
        assert [part.first for part in parts] == [sum(counts[:i]) for i in range(len(counts))]
        assert sum(counts) == whole.step_samples
    epoch = torch.cat([window(1, 1, step)[0].tokens[:, 0] for step in range(5)])[:50]
    assert torch.equal(epoch.sort().values, torch.arange(50))

    with pytest.raises(ValueError, match=r"multiple of accumulation x processes = 5 x 2, got 12"):
        Batches(Units(), 0, 12, 5, 0, 2)


def test_pads_and_supervised_places_are_found():
    (whole,) = window(1, 1)
    rows = whole.tokens[:, 0]
    short = int((rows % 3 == 0).sum())
    assert whole.real_tokens == int(whole.samples.real.sum()) == 36 - short
    assert sorted(whole.labels.tolist()) == sorted([*rows, *rows[rows % 3 != 0]])
    assert torch.equal(whole.tokens.flatten()[whole.positions], whole.labels)


def test_prefetched_windows_are_those_of_their_steps():
    batches = Batches(Units(), 0, 12)
    ahead = Prefetch(batches, 2, 5)
    for step in (2, 3, 4):
        assert torch.equal(ahead.window(step)[0].tokens, batches.window(step)[0].tokens)
    ahead.close()


def test_an_error_in_the_thread_is_that_of_its_step():
    class Broken(Units):
        def batch(self, units):
            raise OSError("disk")

    ahead = Prefetch(Batches(Broken(), 0, 12), 0, 5)
    with pytest.raises(OSError, match="disk"):
        ahead.window(0)
    ahead.close()


def test_batches_walk_through_permutations():
    n, size = 10, 4
    order = torch.cat([batch_indices(1, step, size, n) for step in range(10)])
    epochs = order.view(4, n)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(n))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4


def test_batch_order_depends_on_seed_and_step_only():
    first = batch_indices(5, 37, 8, 100)
    batch_indices(6, 1, 8, 50)
    assert torch.equal(batch_indices(5, 37, 8, 100), first)
    assert not torch.equal(batch_indices(6, 37, 8, 100), first)
    assert not torch.equal(batch_indices(5, 38, 8, 100), first)


def test_batch_larger_than_the_data():
    assert batch_indices(0, 0, 25, 10).bincount().tolist().count(2) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 1, 1), "seed: expected >= 0, got -1"),
        ((0, -1, 1, 1), "step: expected >= 0, got -1"),
        ((0, 0, 0, 1), "batch_size: expected >= 1, got 0"),
        ((0, 0, 1, 0), "n: expected >= 1, got 0"),
    ],
)
def test_batch_indices_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        batch_indices(*arguments)
