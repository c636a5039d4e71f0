import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stars_fast.base.errors import ConfigError
from stars_fast.base.tree import build
from stars_fast.training.step.optim import (
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


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "decay"), [(0.1, 0.1), (20, 20)])
def test_first_step_end_of_warmup_and_last_step(schedule, warmup, decay):
    """In steps and as fractions of a run of 200."""
    config = build(
        OptimConfig,
        {
            "lr": "1e-6",
            "schedule": schedule,
            "warmup_steps": str(warmup),
            "decay_steps": decay,
            "min_lr_ratio": 0.001,
        },
        "optim",
    )
    rates = [learning_rate(config, step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(1e-6 / 20, rel=1e-12)
    assert rates[19] == rates[20] == 1e-6
    assert rates[199] == pytest.approx(1e-9, rel=1e-9)
    if schedule == "wsd":
        assert set(rates[20:180]) == {1e-6}
        assert rates[180] == pytest.approx(1e-6 * (1 - 0.999 / 20), rel=1e-12)
    else:
        middle = (rates[109] + rates[110]) / 2
        assert middle == pytest.approx(1e-6 * (1 + 0.001) / 2, rel=1e-9)


def test_a_fraction_of_a_short_run():
    """The nearest whole number of steps; none in a run too short for one."""
    config = OptimConfig(lr=1.0, warmup_steps=0.1)
    assert learning_rate(config, 0, 25) == 0.5
    assert learning_rate(config, 0, 4) == 1.0


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
        ({"schedule": "linear"}, "schedule: expected one of"),
        ({"betas": (0.9,)}, "betas: expected two numbers"),
        ({"betas": (0.9, 1.0)}, "betas: expected two numbers"),
        ({"lr": -1.0}, "lr: expected at least 0"),
        ({"warmup_steps": 2.5}, "warmup_steps: expected a whole number of steps, or a fraction"),
        ({"decay_steps": -0.1}, "decay_steps: expected at least 0"),
        ({"min_lr_ratio": 2.0}, r"min_lr_ratio: expected a value in \[0, 1\]"),
        ({"clip": 0.0}, "clip: expected a positive number or none"),
    ],
)
def test_settings_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**wrong)


# -- stochastic rounding


@pytest.fixture
def rounding():
    """rounding(model) -> torchao's AdamW over it, run as written: compiling takes a while."""
    pytest.importorskip("torchao.optim")
    with torch.compiler.set_stance("force_eager"):
        yield lambda model: make_optimizer(
            OptimConfig(stochastic_rounding=True, weight_decay=0.5), model
        )


def grads(model, step):
    """A gradient for the parameters, a function of the step."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def make_bfloat16():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16()


def test_stochastic_rounding_is_adamw_rounded(rounding):
    """Each weight is one of the two numbers around what AdamW in fp32 gives, the averages its."""
    model, wide = make_bfloat16(), make_bfloat16().float()
    mine, exact = rounding(model), make_optimizer(OptimConfig(weight_decay=0.5), wide)
    for net, optimizer in ((model, mine), (wide, exact)):
        grads(net, 0)
        for p in net.parameters():
            p.grad = p.grad.bfloat16().to(p.dtype)
        step_if(optimizer, torch.tensor(True), 0.003)
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        spacing = 2.0 ** (torch.log2(q.abs()).floor() - 7)
        assert ((p.float() - q).abs() <= spacing).all()
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine.state[p][name], exact.state[q][name])
    weight, target = model[0].weight.float(), wide[0].weight
    assert 0.3 < float((weight > target).float().mean()) < 0.7


def test_a_step_that_is_not_finite_leaves_rounded_weights(rounding):
    model = make_bfloat16()
    optimizer = rounding(model)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    step_if(optimizer, torch.tensor(False), 0.1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}


def test_stochastic_rounding_resumes_bit_for_bit(rounding):
    """Averages keep their fp32, and the draws follow from the step."""

    def run(model, optimizer, steps):
        for step in steps:
            grads(model, step)
            step_if(optimizer, torch.tensor(True), 1e-4)

    whole, first, second = make_bfloat16(), make_bfloat16(), make_bfloat16()
    run(whole, rounding(whole), range(4))
    optimizer = rounding(first)
    run(first, optimizer, range(2))
    torch.rand(5)
    second.load_state_dict(first.state_dict())
    resumed = rounding(second)
    resumed.load_state_dict(optimizer.state_dict())
    run(second, resumed, range(2, 4))
    for p, q in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)
        assert resumed.state[p]["exp_avg_sq"].dtype == torch.float32
    assert not torch.equal(second[0].weight, first[0].weight)


def test_stochastic_rounding_wants_bf16_weights_and_torchao(monkeypatch):
    config = OptimConfig(stochastic_rounding=True)
    with pytest.raises(ConfigError, match=r"to bfloat16, got weights of torch\.float32"):
        make_optimizer(config, nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match="stochastic_rounding need torchao: pip install"):
        make_optimizer(config, nn.Linear(2, 2).bfloat16())
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(__version__="9.9"))
    monkeypatch.setitem(sys.modules, "torchao.optim", SimpleNamespace())
    with pytest.raises(ConfigError, match=r"needs torchao\.optim\._AdamW.*torchao 9\.9"):
        make_optimizer(config, nn.Linear(2, 2).bfloat16())
