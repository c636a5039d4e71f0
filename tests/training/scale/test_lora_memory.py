"""Memory of a step that trains adapters alone: what the backward pass keeps beside that of the same
step on all weights, and what gradients and averages will take."""

import numpy as np
import pytest
import torch
from ouro_runs import ouro_run

from stars_fast.data.batches import Batches
from stars_fast.data.documents import PackedChats
from stars_fast.models.families.ouro import FAMILY, OuroLoop
from stars_fast.models.lora import LoraConfig, adapt, adapted_layers
from stars_fast.training.scale import budget
from stars_fast.training.scale.budget import activation_budget
from stars_fast.training.scale.fit_memory import measure
from stars_fast.training.scale.measure import KeptBytes
from stars_fast.training.scale.memory import MemoryConfig
from stars_fast.training.step.optim import OptimConfig, make_optimizer
from stars_fast.training.step.precision import autocast
from stars_fast.training.step.train_step import StepLoss, StepPlan
from stars_fast.training.step.turns import Recompute

pytest.importorskip("peft")
pytestmark = pytest.mark.slow

TURNS, RANK, LAYERS, MAPS = 3, 8, 2, 7
CPU = torch.device("cpu")


class EightAlike:
    lengths = np.full(8, 24)

    def __len__(self):
        return 8

    def document(self, index):
        tokens = np.random.default_rng(index).integers(3, 300, 24).astype(np.int32)
        return tokens, np.arange(24) > 5


@pytest.fixture
def batch():
    (batch,) = Batches(PackedChats(EightAlike(), 192, 0), 0, 1).window(0)
    return batch


@pytest.fixture
def step_of(tmp_path):
    def make(lora, precision="mixed", at="next", dropout=0.0):
        config = ouro_run(
            tmp_path / "run",
            tmp_path,
            method="jsrr",
            precision=precision,
            penalty={"at": at, "detach": at == "next"},
        )
        frozen = torch.bfloat16 if lora and precision == "mixed" else torch.float32
        model, _ = FAMILY.start(config.model, frozen, config.seed)
        loop = OuroLoop(model.train())
        if lora:
            adapt(loop, LoraConfig(rank=RANK, dropout=dropout), torch.float32, 0)
            for layer in adapted_layers(model).values():
                torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
        return StepLoss(loop, config)

    return make


def measured(step_loss, batch):
    with autocast(step_loss.config.precision, CPU, False):
        return step_loss.with_weights(measure, batch, step_loss.config, True)


def share(step_loss, batch):
    with autocast(step_loss.config.precision, CPU, False):
        return step_loss(batch, StepPlan(0, [TURNS], 0.1, 0.0), TURNS, len(batch.labels))[0]


def test_frozen_weights_keep_nothing(step_of, batch):
    """Adapters read the states that their maps read, which are kept once, and add rank numbers a
    token and map, in bf16; no copies of the weights in bf16 are kept, and no gradient of the head.
    """
    adapters, whole = (measured(step_of(lora), batch) for lora in (True, False))
    tokens = batch.tokens.numel()
    added = adapters.turn - whole.turn
    assert 0 < added <= 1.1 * 2 * RANK * tokens * LAYERS * MAPS
    casts = 2 * sum(p.numel() for p in step_of(True).parameters() if p.requires_grad)
    assert adapters.shared <= 1.1 * casts < whole.shared
    assert adapters.rest < whole.rest / 3
    assert adapters.turn_by_layer == whole.turn_by_layer


@pytest.mark.parametrize("at", ["next", "last"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_kept_is_what_was_measured(step_of, batch, at, dropout):
    step_loss = step_of(True, at=at, dropout=dropout)
    found = measured(step_loss, batch)
    with KeptBytes(step_loss) as kept:
        loss = share(step_loss, batch)
    del loss
    turns = TURNS - (at == "last")
    expected = found.shared + turns * found.turn + found.dual + found.rest
    assert kept.new() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("plan", [Recompute(2, "turn"), Recompute(3, "layer", True)], ids=str)
def test_recomputing_does_not_change_the_gradient(step_of, batch, plan, dropout):
    step_loss = step_of(True, precision="float32", dropout=dropout).double()
    parameters = [p for p in step_loss.parameters() if p.requires_grad]
    assert len(parameters) == 2 * LAYERS * MAPS
    gradients = []
    for recompute in (Recompute(), plan):
        step_loss.recompute = lambda turns, penalised, which=recompute: which
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(share(step_loss, batch), parameters))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert all(gradient.norm() > 0 for gradient in gradients[0])


def test_room_is_left_for_the_adapters_alone(step_of, monkeypatch):
    monkeypatch.setattr(budget, "free_memory", lambda device: 10**9)
    step_loss = step_of(True)
    optimizer = make_optimizer(OptimConfig(), step_loss)
    sizes = [4 * p.numel() for p in step_loss.parameters() if p.requires_grad]
    found = activation_budget(MemoryConfig(), step_loss, optimizer)
    # A gradient, two averages, and one gradient before it is added to its sum
    assert found == int(0.9 * (10**9 - 3 * sum(sizes) - max(sizes)))
