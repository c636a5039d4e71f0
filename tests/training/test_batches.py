"""The micro-batches of a step."""

import pytest
import torch

from stars_fast.training.batches import Batches


def test_the_micro_batches_of_a_step_are_its_batch():
    class Data:
        train = torch.arange(50)

        def batch(self, split, indices):
            tokens = self.train[indices][:, None].expand(-1, 3)
            return tokens, tokens.clone(), torch.ones_like(tokens, dtype=torch.bool)

    def samples(accumulation, world_size, step=3):
        parts = []
        for rank in range(world_size):
            batches = Batches(Data(), 0, 12, accumulation, rank, world_size)
            parts += batches.window(step)
        parts.sort(key=lambda part: part.first)
        assert [part.index for part in parts] == list(range(accumulation * world_size))
        return torch.cat([part.tokens[:, 0] for part in parts])

    whole = samples(1, 1)
    for accumulation, world_size in ((3, 1), (1, 2), (2, 3)):
        assert torch.equal(samples(accumulation, world_size), whole)
    epoch = torch.cat([samples(1, 1, step) for step in range(5)])[:50]
    assert torch.equal(epoch.sort().values, torch.arange(50))

    with pytest.raises(ValueError, match=r"multiple of accumulation x processes = 5 x 2, got 12"):
        Batches(Data(), 0, 12, 5, 0, 2)


def test_pads_and_supervised_places_are_found():
    class Data:
        train = torch.arange(2)

        def batch(self, split, indices):
            tokens = torch.tensor([[5, 6, 7], [8, 9, 0]])
            targets = torch.tensor([[-100, 7, 1], [-100, 2, -100]])
            return tokens[indices], targets[indices], (tokens != 0)[indices]

    (whole,) = Batches(Data(), 0, 2).window(0)
    assert whole.real_tokens == int(whole.mask.sum()) == 5
    assert sorted(whole.labels.tolist()) == [1, 2, 7]
    single = Batches(Data(), 0, 2, accumulation=2).window(0)
    padded, full = sorted(single, key=lambda micro: micro.real_tokens)
    assert full.mask is None
    assert padded.mask.tolist() == [[True, True, False]]
    assert (padded.positions.tolist(), padded.labels.tolist()) == ([1], [2])
