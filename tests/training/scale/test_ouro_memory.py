"""What the step keeps and recomputes on Ouro, where the penalty is on a part of the samples."""

import numpy as np
import pytest
import torch
from ouro_runs import ouro_run

from stars_fast.data.batches import Batches
from stars_fast.data.documents import PackedChats
from stars_fast.models.families.ouro import FAMILY, OuroLoop
from stars_fast.training.scale.distributed import processes
from stars_fast.training.scale.fit_memory import measure
from stars_fast.training.scale.measure import KeptBytes
from stars_fast.training.scale.parallel import gradient_sync
from stars_fast.training.scale.sharding import shard
from stars_fast.training.step.train_step import StepLoss, StepPlan
from stars_fast.training.step.turns import Recompute

TURNS = 3
PLANS = [
    Recompute(1, selective=True),
    Recompute(2, "turn"),
    Recompute(2, "layer", True),
    Recompute(1, "layer"),
    Recompute(),
]


class EightAlike:
    """Documents of one length, so that half of them are half of the tokens."""

    lengths = np.full(8, 24)

    def __len__(self):
        return 8

    def document(self, index):
        tokens = np.random.default_rng(index).integers(3, 300, 24).astype(np.int32)
        return tokens, np.arange(24) > 5


@pytest.fixture(scope="module")
def step_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = ouro_run(folder / "run", folder)
    model, _ = FAMILY.start(config.model, torch.float32, config.seed)

    def make(dtype=torch.float32, **penalty):
        config = ouro_run(folder / "run", folder, method="jsrr", penalty=penalty)
        return StepLoss(OuroLoop(model.to(dtype).train()), config)

    return make


@pytest.fixture
def batch():
    (batch,) = Batches(PackedChats(EightAlike(), 192, 0), 0, 1).window(0)
    assert batch.samples.count == 8
    return batch


def share(step_loss, batch):
    plan = StepPlan(0, [TURNS], 0.1, 0.0)
    loss, _ = step_loss(batch, plan, TURNS, len(batch.labels))
    return loss


@pytest.mark.parametrize("at", ["next", "last"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe().replace(" ", "-"))
def test_recomputing_does_not_change_the_gradient(step_of, batch, at, plan):
    step_loss = step_of(torch.float64, at=at, detach=at == "next", fraction=0.5)
    parameters = [p for p in step_loss.parameters() if p.requires_grad]
    expected = torch.autograd.grad(share(step_loss, batch), parameters)
    step_loss.recompute = lambda turns, penalised: plan
    found = torch.autograd.grad(share(step_loss, batch), parameters)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


def sharded_gradients(folder, batch, precision, reshard, plan):
    config = ouro_run(folder / "run", folder, method="jsrr", precision=precision)
    model, _ = FAMILY.start(config.model, torch.float32, config.seed)
    step_loss = StepLoss(OuroLoop(model.train()), config)
    step_loss.recompute = lambda turns, penalised: plan
    with processes("cpu") as world:
        shard(step_loss, step_loss.loop.layers, precision, world, None, reshard, offload=False)
        with gradient_sync(step_loss, now=True):
            share(step_loss, batch).backward()
        found = [p.grad.to_local() for p in step_loss.parameters() if p.grad is not None]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("precision", ["mixed", "float32"])
def test_norms_and_gates_of_shards_are_made_again(tmp_path, batch, precision, reshard):
    """Weights that were dropped after the forward are there again when the backward asks."""
    plans = Recompute(), Recompute(selective=True), Recompute(1, selective=True)
    expected, *others = (
        sharded_gradients(tmp_path, batch, precision, reshard, plan) for plan in plans
    )
    assert len(expected) > 20
    for found in others:
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("at", ["next", "last"])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_what_is_kept_is_what_was_measured(step_of, batch, at, fraction):
    """At most, with a penalty on a part: any part of a micro-batch may be drawn."""
    step_loss = step_of(at=at, detach=at == "next", fraction=fraction)
    measured = step_loss.with_weights(measure, batch, step_loss.config, True)
    with KeptBytes(step_loss) as kept:
        loss = share(step_loss, batch)
    del loss
    turns = TURNS - (at == "last")
    expected = measured.shared + turns * measured.turn + measured.dual + measured.rest
    if fraction == 1.0:
        assert kept.new() == pytest.approx(expected, rel=0.05)
    else:
        assert kept.new() < expected
