"""The validation loss at several depths, against the model called at each."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from stars_fast.data import IGNORE
from stars_fast.data.documents import PaddedChats
from stars_fast.models.families.ouro import FAMILY, OuroLoop
from stars_fast.training.config import config_from
from stars_fast.training.run.validation import validation_losses
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.train_step import StepLoss

LENGTHS = [7, 12, 3, 9, 5, 12, 4]
ALONE = World(0, 1, torch.device("cpu"))


class Chats:
    """Seven documents of random tokens; about half of the tokens are targets."""

    lengths = np.array(LENGTHS)

    def __len__(self):
        return len(self.lengths)

    def document(self, index):
        rng = np.random.default_rng(index)
        length = self.lengths[index]
        targets = rng.random(length) < 0.5
        targets[:2] = False, True
        return rng.integers(3, 300, length).astype(np.int32), targets


@pytest.fixture(scope="module")
def root():
    """A `StepLoss` of a tiny Ouro, in training."""
    config = config_from(
        {
            "task": "ouro",
            "method": "stars",
            "precision": "float32",
            "model": {"path": "tiny", "width": 32, "layers": 1},
            "data": {"source": "tiny-chat"},
        }
    )
    return StepLoss(
        OuroLoop(FAMILY.start(config.model, torch.float32, config.seed)[0].train()), config
    )


def by_hand(root, turns):
    """One document after the other, by the loss of the transformers model."""
    model, total, count = root.loop.model, 0.0, 0
    model.eval()
    for number in range(len(LENGTHS)):
        tokens, targets = map(torch.from_numpy, Chats().document(number))
        labels = torch.where(targets, tokens, IGNORE).long()
        with torch.no_grad():
            loss = model(tokens.long()[None], labels=labels[None], turns=turns).loss
        total += float(loss) * int(targets.sum())
        count += int(targets.sum())
    model.train()
    return total / count


def losses(root, turns, world=ALONE, units=3, source=None):
    source = source or PaddedChats(Chats(), 0)
    return validation_losses(root, source, turns, world, units, nullcontext())


def test_one_pass_gives_the_loss_of_the_model_at_each_depth(root):
    found = losses(root, (5, 1, 2, 5))
    assert list(found) == [1, 2, 5]
    for turns, loss in found.items():
        assert loss == pytest.approx(by_hand(root, turns), rel=1e-5)
    assert len({round(loss, 4) for loss in found.values()}) == 3


@pytest.mark.parametrize("units", [1, 2, 7, 100])
def test_the_loss_does_not_depend_on_how_many_chats_go_at_once(root, units):
    assert losses(root, (1, 3), units=units) == pytest.approx(losses(root, (1, 3)), rel=1e-6)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_several_processes_share_the_chats(root, size, monkeypatch):
    """Each calls the root as often as the others, as sharded weights need it."""
    sums, calls = [], []

    def sum_(world, values):
        """What the first process gets, in the end: the sum over all."""
        sums.append(values.clone())
        return torch.stack(sums).sum(0)

    def counted(*args, real=root.with_weights):
        calls.append(rank)
        return real(*args)

    expected = losses(root, (1, 3))
    with monkeypatch.context() as patch:
        patch.setattr(root, "with_weights", counted)
        patch.setattr(World, "sum_", sum_)
        for rank in range(size):
            found = losses(root, (1, 3), World(rank, size, torch.device("cpu")), units=2)
    assert found == pytest.approx(expected, rel=1e-6)
    assert [calls.count(rank) for rank in range(size)] == [-(-4 // size)] * size  # of four pairs
    assert len(sums) == size


def test_the_mode_is_restored_and_no_gradient_is_left(root):
    for training in (True, False):
        root.train(training)
        losses(root, (2,))
        assert all(module.training == training for module in root.modules())
    root.train()
    assert all(p.grad is None for p in root.parameters())


def test_the_mode_is_restored_after_a_failure(root):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.root, self.config = root, root.config

        def with_weights(self, *args):
            raise RuntimeError("out of memory")

    broken = Broken().train()
    with pytest.raises(RuntimeError, match="out of memory"):
        losses(broken, (2,))
    assert broken.training
