import math

import pytest
import torch
from torch import nn

from stars_fast.training.optim import (
    OptimConfig,
    gradient_norm,
    learning_rate,
    make_optimizer,
    step_if,
)


def test_cosine_at_its_corners():
    config = OptimConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 21) for step in range(21)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[12] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[20] == pytest.approx(0.2, rel=1e-12)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_warmup_stable_decay_at_its_corners():
    config = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2)
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_no_decay_is_constant():
    config = OptimConfig(lr=3.0, schedule="wsd")
    assert {learning_rate(config, step, 5) for step in range(5)} == {3.0}


def test_decay_is_on_matrices_only():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(OptimConfig(weight_decay=0.5, lr=0.1), model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    step_if(optimizer, torch.tensor(True), 0.1)
    for name, p in model.named_parameters():
        expected = before[name] * (0.95 if p.dim() == 2 else 1.0)
        torch.testing.assert_close(p.detach(), expected)


def test_a_step_that_is_not_finite_leaves_weights_and_state():
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(OptimConfig(), model)

    def step(value, finite):
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        step_if(optimizer, torch.tensor(finite), 0.1)

    step(1.0, True)
    weights = [p.detach().clone() for p in model.parameters()]
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
    step(float("nan"), False)
    for p, weight, state in zip(model.parameters(), weights, states, strict=True):
        assert torch.equal(p, weight)
        assert all(torch.equal(optimizer.state[p][k], v) for k, v in state.items())
    step(1.0, True)
    assert not torch.equal(weights[0], model.weight)


@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
def test_gradient_norm_is_that_before_clipping(clip):
    model = nn.Linear(3, 2)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    assert float(gradient_norm(model, clip)) == pytest.approx(2.0 * math.sqrt(8))
    after = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    expected = min(2.0 * math.sqrt(8), math.inf if clip is None else clip)
    assert after == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "linear"}, "schedule must be one of"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"min_lr_ratio": 2.0}, r"min_lr_ratio must be in \[0, 1\]"),
        ({"clip": 0.0}, "clip must be positive or none"),
    ],
)
def test_settings_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**wrong)
