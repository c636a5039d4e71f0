"""The rivals of the penalty: each against its formula, written out in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stars_fast.base.checkpoints import latest, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.base.tree import merge
from stars_fast.data.addition import AdditionData
from stars_fast.data.batches import Batches
from stars_fast.data.kinds.sums import Sums
from stars_fast.data.samples import sample_noise
from stars_fast.models.families.looped_lm import FAMILY, LoopedLoop
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.trainer import train
from stars_fast.training.step.cost import expected_costs, step_cost
from stars_fast.training.step.loop_config import LoopChange
from stars_fast.training.step.micro_step import MicroStep, rms
from stars_fast.training.step.penalties.jacobian import DUAL_TURN
from stars_fast.training.step.train_step import StepLoss, plan_step

ROUND = {"depth": {"law": "fixed", "value": 3}}
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Written:
    """A run's first step with its model in fp64, and the formulas of its parts."""

    def __init__(self, config):
        self.config = config
        model, _ = FAMILY.start(config.model, torch.float64, config.seed)
        for parameter in model.parameters():  # away from where adapters and biases begin
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.2)
        self.model, self.loss = model, StepLoss(LoopedLoop(model), config)
        (self.batch,) = Batches(Sums(AdditionData(config.data)), config.seed, 16).window(0)
        self.e = model.prelude(self.batch.tokens)
        self.real = torch.ones_like(self.e[..., :1])

    def turn(self, h):
        injection = self.config.model.injection
        if injection == "add":
            h = h + self.e
        elif injection == "adapter":
            h = torch.cat((h, self.e), -1) @ self.model.adapter.linear.weight.T
        return self.model.block(h)

    def token_loss(self, h):
        logits = self.model.head(h).flatten(0, 1)[self.batch.positions]
        return F.cross_entropy(logits, self.batch.labels)

    def relative(self, before, after):
        steps = ((after - before) * self.real).square().sum((1, 2))
        return (steps / (after.detach() * self.real).square().sum((1, 2))).mean()

    def squares(self, h):
        """||J v||^2 of each sample, by the transpose of u -> J^T u."""
        v = sample_noise(h, self.batch.samples, self.config.seed, 0, range(16))
        v = v / v.square().sum((1, 2), keepdim=True).sqrt()
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            h = h if h.requires_grad else h.requires_grad_()
            out = self.turn(h)
            u = torch.zeros_like(out, requires_grad=True)
            (back,) = torch.autograd.grad(out, h, u, create_graph=True)
            (jv,) = torch.autograd.grad(back, u, v, create_graph=True)
        return (jv * self.real).square().sum((1, 2))

    def agrees(self, expected):
        """Value and gradient of the step are those of `expected`."""
        got, _ = self.loss(self.batch, plan_step(self.config, 0), 3, len(self.batch.labels))
        torch.testing.assert_close(got, expected, **CLOSE)
        weights = list(self.model.parameters())
        grads = [
            torch.autograd.grad(each, weights, retain_graph=True, allow_unused=True)
            for each in (got, expected)
        ]
        for name, a, b in zip(dict(self.model.named_parameters()), *grads, strict=True):
            torch.testing.assert_close(
                a, torch.zeros_like(a) if b is None else b, **CLOSE, msg=name
            )


@pytest.fixture
def written(tiny):
    """written(**changes) -> the first step of a run of three turns, in fp64.

    With RMSNorm, which torch writes out: the third derivative of its layer norm is wrong."""
    base = {**ROUND, "method": "sft", "model": {"norm": "rmsnorm"}}
    return lambda **changes: Written(tiny(**merge(base, changes)))


def states_of(step):
    states = [step.e]
    for _ in range(3):
        states.append(step.turn(states[-1]))
    return states


@pytest.mark.parametrize("injection", ["none", "add", "adapter"])
def test_an_injection_enters_every_turn(written, injection):
    step = written(model={"injection": injection}, method="jsrr")
    h = states_of(step)[-1]
    step.agrees(0.9 * step.token_loss(h) + 0.1 * step.squares(h.detach()).mean())


@pytest.mark.parametrize("margin", [0.05, 0.4, 50.0])
def test_the_hinge_presses_where_the_map_does_not_shrink(written, margin):
    step = written(method="jsrr", penalty={"margin": margin})
    h = states_of(step)[-1]
    squares = step.squares(h.detach())
    pressed = squares > margin**2
    expected = torch.where(pressed, squares.clamp_min(1e-30).sqrt() - margin, 0.0).square().mean()
    step.agrees(0.9 * step.token_loss(h) + 0.1 * expected)
    assert bool(pressed.all()) == (margin == 0.05)
    assert bool(pressed.any()) == (margin < 50)


@pytest.mark.parametrize("detach", [True, False])
def test_the_fixed_point_loss_is_the_relative_step_of_a_further_turn(written, detach):
    step = written(method="fixed-point", penalty={"detach": detach})
    h = states_of(step)[-1]
    start = h.detach() if detach else h
    penalty = step.relative(start, step.turn(start))
    step.agrees(0.9 * step.token_loss(h) + 0.1 * penalty)
    assert penalty > 1e-4


def test_the_fixed_point_loss_of_the_last_turn(written):
    step = written(method="fixed-point", penalty={"at": "last", "detach": False})
    before, h = states_of(step)[-2:]
    step.agrees(0.9 * step.token_loss(h) + 0.1 * step.relative(before, h))


@pytest.mark.parametrize("fraction", [1.0, 0.25])
@pytest.mark.parametrize("at", ["next", "last"])
def test_the_fixed_point_loss_beside_the_penalty(written, at, fraction):
    settings = {"at": at, "detach": False, "fixed_point": 0.7, "fraction": fraction}
    step = written(method="jsrr", penalty=settings, model={"injection": "add"})
    *_, before, h = states_of(step)
    start = before if at == "last" else h
    chosen = step.loss.penalty.drawn(step.batch, 0)
    part = slice(None) if chosen is None else chosen.chosen
    assert (chosen is None) == (fraction == 1.0)
    squares, after = step.squares(start)[part], step.turn(start)
    step.real = step.real[part]
    relative = step.relative(start[part], after[part])
    step.agrees(0.9 * step.token_loss(h) + 0.1 * (squares.mean() + 0.7 * relative))


def test_one_step_is_the_gradient_of_the_last_turn_alone(written):
    step = written(method="one-step", model={"injection": "add"})
    assert step.config.train.backprop_turns == 1
    h = states_of(step)[-2].detach()
    step.agrees(step.token_loss(step.turn(h)))


def test_one_step_is_the_implicit_gradient_to_first_order(written):
    """At a fixed point the gradient is that through (I - J)^-1 = I + J + ...; what one step leaves
    out is of the size of J."""
    errors = []
    for scale in (1.0, 0.5):
        step = written(method="one-step", model={"injection": "add"})
        inner = step.model.block

        def turn(h, scale=scale, inner=inner, e=step.e):
            return e + 0.03 * scale * torch.tanh(inner(h + e))

        h = step.e.detach()
        with torch.no_grad():
            for _ in range(60):
                h = turn(h)
            assert float((turn(h) - h).norm()) < 1e-10
        (g,) = torch.autograd.grad(step.token_loss(x := h.clone().requires_grad_()), x)
        weights = list(inner.parameters())
        implicit = g
        for _ in range(60):  # u = g + J^T u
            (back,) = torch.autograd.grad(turn(x), x, implicit)
            implicit = g + back
        one, exact = (
            torch.cat([p.flatten() for p in torch.autograd.grad(turn(h), weights, each)])
            for each in (g, implicit)
        )
        errors.append(float((one - exact).norm() / exact.norm()))
    assert 0 < errors[1] < 0.7 * errors[0] < 0.3


@pytest.mark.parametrize("at", ["next", "last"])
def test_noise_is_on_every_state_that_a_turn_starts_from(written, at):
    settings = {"at": at, "detach": False}
    step = written(loop={"noise": 0.1}, method="jsrr", penalty=settings, model={"injection": "add"})
    micro = MicroStep(step.loss.loop, step.batch, step.config, 0)
    h = step.e
    for turn in range(3):
        noise = micro.disturbed(torch.ones_like(h), turn) - 1
        assert float(noise.std()) == pytest.approx(0.1, rel=0.1)
        before = h + noise * h.detach().square().mean(-1, keepdim=True).sqrt()
        h = step.turn(before)
    squares = step.squares(before if at == "last" else h)
    step.agrees(0.9 * step.token_loss(h) + 0.1 * squares.mean())


def test_noise_is_a_finite_difference_of_the_jacobian(written):
    """E ||Phi(h + sigma n) - Phi(h)||^2 / sigma^2 is ||J||_F^2 for small sigma, as E ||J v||^2 is
    ||J||_F^2 / D."""
    step = written(loop={"noise": 1e-5}, model={"placement": "pre"})
    h = states_of(step)[-1].detach()[:1]
    h = F.normalize(h, dim=-1) * h.shape[-1] ** 0.5  # of unit size, which the noise is relative to
    torch.testing.assert_close(rms(h), torch.ones_like(rms(h)))
    J = torch.func.jacrev(step.model.block)(h).reshape(h.numel(), h.numel())
    generator = torch.Generator().manual_seed(0)
    n = torch.randn(500, *h.shape[1:], generator=generator, dtype=h.dtype)
    with torch.no_grad():
        moved = (step.model.block(h + 1e-5 * n) - step.model.block(h)) / 1e-5
    found = moved.square().sum((1, 2))
    error = float(found.std()) / 500**0.5
    assert abs(float(found.mean() - J.square().sum())) < 3 * error
    assert error < 0.05 * float(J.square().sum())


def test_the_progressive_loss_goes_on_without_a_gradient(written):
    change = {"progressive": 0.3, "free_turns": 5, "graph_turns": 2}
    step = written(loop=change, model={"injection": "adapter"})
    h = deep = states_of(step)[-1]
    free = step.config.loop.drawn_turns(step.config.seed, 0, 0)
    deep = h.detach()
    for _ in range(free):
        deep = step.turn(deep).detach()
    for _ in range(2):
        deep = step.turn(deep)
    step.agrees(0.7 * step.token_loss(h) + 0.3 * step.token_loss(deep))


def test_free_turns_are_each_as_likely():
    change = LoopChange(progressive=0.5, free_turns=4)
    drawn = [change.drawn_turns(0, step, 0) for step in range(4000)]
    assert [drawn.count(n) for n in range(1, 5)] == pytest.approx([1000] * 4, rel=0.15)
    assert [change.drawn_turns(0, step, 0) for step in range(9)] == drawn[:9]


def test_costs(tiny):
    def cost(**changes):
        return step_cost(tiny(**{**ROUND, "method": "sft", **changes}), 3, 0, outside=0.5)

    change = {"progressive": 0.3, "free_turns": 5, "graph_turns": 2}
    assert cost(loop=change) == pytest.approx(3.5 + 3 / 3 + 2 + 0.5)
    assert cost(loop={"noise": 0.1}) == 3.5
    assert cost(method="fixed-point") == 4.5
    assert cost(method="fixed-point", penalty={"at": "last", "detach": False}) == 3.5
    assert cost(method="jsrr", penalty={"fixed_point": 1.0}) == 3.5 + DUAL_TURN
    one = tiny(**{**ROUND, "method": "one-step"}, model={"injection": "add"})
    assert expected_costs(one, outside=0.5)[0] == pytest.approx(1 + 2 / 3 + 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "one-step"}, "expected another than one-step for turns that take in nothing"),
        (
            {"method": "one-step", "train": {"backprop_turns": 4}, "model": {"injection": "add"}},
            "train.backprop_turns: expected none or 1 with method one-step, got 4",
        ),
        ({"model": {"state": "noise"}}, "injection: expected add or adapter with state 'noise'"),
        ({"model": {"injection": "mul"}}, "injection: expected one of"),
        ({"loop": {"progressive": 1.5}}, r"progressive: expected a number in \[0, 1\]"),
        ({"loop": {"noise": -0.1}}, "noise: expected a number in"),
        ({"penalty": {"margin": -1.0}}, "margin: expected a number in"),
        (
            {"method": "fixed-point", "penalty": {"margin": 0.5}},
            "penalty.margin: expected 0 with method fixed-point, which takes no Jacobian, got 0.5",
        ),
        ({"penalty": {"fixed_point": 1.0}}, "penalty.fixed_point: expected 0 with method sft"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny, changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**{**ROUND, "method": "sft", **changes})


INJECTED = {"injection": "adapter", "state": "noise", "dropout": 0.1}
RUNS = {
    "hinge": {"method": "stars", "penalty": {"margin": 0.3, "fixed_point": 0.5}},
    "fixed-point": {"method": "fixed-point", "depth": {"law": "uniform"}, "loop": {"noise": 0.1}},
    "one-step": {"method": "one-step", "loop": {"progressive": 0.4, "graph_turns": 2}},
    "noisy": {
        "method": "stars",
        "penalty": {"at": "last", "detach": False, "fraction": 0.5},
        "loop": {"noise": 0.2, "progressive": 0.4},
        "train": {"backprop_turns": 2},
    },
}
each_run = pytest.mark.parametrize("name", RUNS)


def run_of(tiny, name, **changes):
    constant = {"optim": {"schedule": "wsd", "decay_steps": 0}}
    changes = merge({"model": INJECTED, "train": {"steps": 6}, **constant}, changes)
    return tiny(**merge(RUNS[name], changes))


def rows(outcome):
    return read_metrics(outcome.folder / "metrics.jsonl")


@pytest.mark.slow
@each_run
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tiny, name, tmp_path):
    straight = train(run_of(tiny, name, out=str(tmp_path / "straight")))
    train(run_of(tiny, name, train={"steps": 3}))
    resumed = train(run_of(tiny, name), resume=True)
    found, expected = (saved_tensors(latest(o.folder / "checkpoints")) for o in (resumed, straight))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@each_run
@pytest.mark.parametrize("recompute", ["turn", "layer", "selective"])
def test_recomputing_does_not_change_a_run(tiny, name, recompute, tmp_path):
    plain = run_of(tiny, name, memory={"recompute": "none"}, out=str(tmp_path / "plain"))
    again = run_of(tiny, name, memory={"recompute": recompute}, out=str(tmp_path / "again"))
    lines = [
        [(row["loss"], row["penalty"], row["grad_norm"]) for row in rows(train(each))]
        for each in (plain, again)
    ]
    assert lines[0] == lines[1]


@pytest.mark.slow
@each_run
@pytest.mark.parametrize("precision", ["float32", "mixed", "bfloat16"])
def test_a_run_lowers_its_loss(tiny, name, precision):
    changes = {"train": {"steps": 40}, "optim": {"lr": 0.01}, "precision": precision}
    found = [row["loss"] for row in rows(train(run_of(tiny, name, **changes)))]
    assert sum(found[-5:]) < 0.8 * sum(found[:5])
