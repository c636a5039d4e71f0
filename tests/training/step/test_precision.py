"""Weights and computation in their precisions: errors against fp64, and weights that move."""

import pytest
import torch
from looped_loss import LoopedLoss, micro_batch
from torch import nn

from stars_fast.training.scale.distributed import processes
from stars_fast.training.scale.parallel import ParallelConfig, gradient_sync, parallelise
from stars_fast.training.step.optim import OptimConfig, gradient_norm, make_optimizer, step_if
from stars_fast.training.step.precision import (
    PRECISIONS,
    autocast,
    parameter_dtype,
    rounding_warning,
)

CPU = torch.device("cpu")
MICRO = micro_batch(0, turns=3, length=24)
WIDTH = 32


def gradients(loss):
    """In fp64, by name."""
    found = {name: p.grad for name, p in loss.named_parameters()}
    return {
        name: (g.full_tensor() if hasattr(g, "full_tensor") else g).double()
        for name, g in found.items()
    }


def errors(mine, exact):
    return {name: float((mine[name] - g).norm() / g.norm()) for name, g in exact.items()}


@pytest.fixture(scope="module", params=[False, True], ids=["tokens", "penalty"])
def references(request):
    """The penalty or none, exact gradients, and the errors of PyTorch's own ops in bf16."""
    exact, plain = (LoopedLoss(WIDTH, request.param, plain=True) for _ in range(2))
    exact.double()(MICRO).backward()
    plain.bfloat16()(MICRO).backward()
    return request.param, gradients(exact), errors(gradients(plain), gradients(exact))


@pytest.mark.parametrize("recompute", ["none", "layer", "turn"])
@pytest.mark.parametrize("kind", ["auto", "fsdp"])
def test_gradients_in_mixed_precision(references, kind, recompute):
    penalised, exact, plain = references
    loss = LoopedLoss(WIDTH, penalised).to(parameter_dtype("mixed"))
    loss.recompute = recompute
    config = ParallelConfig(kind=kind)
    with processes("cpu") as world:
        module = parallelise(loss, loss.layers, config, "mixed", world)
        with gradient_sync(module, True):
            with autocast("mixed", world.device, config.sharded):
                value = module(MICRO)
            value.backward()
        assert value.dtype == torch.float32
        assert {p.grad.dtype for p in loss.parameters()} == {torch.float32}
        mine = errors(gradients(loss), exact)
    assert max(plain.values()) > 1e-4
    for name, error in mine.items():
        assert error < 2 * plain[name], name
    assert sum(mine.values()) < 1.2 * sum(plain.values())


def test_float32_is_fp32_throughout():
    loss, exact = LoopedLoss(), LoopedLoss(plain=True).double()
    with autocast("float32", CPU, sharded=False):
        value = loss(MICRO)
    value.backward()
    exact(MICRO).backward()
    assert value.dtype == torch.float32
    assert max(errors(gradients(loss), gradients(exact)).values()) < 1e-5


def moved_after(steps, precision, stochastic_rounding, lr):
    """The part of the weights that differ after so many steps of AdamW on noise."""
    torch.manual_seed(0)
    model = nn.Linear(128, 64, bias=False)
    nn.init.normal_(model.weight, std=0.02)
    model.to(parameter_dtype(precision))
    before = model.weight.detach().clone()
    config = OptimConfig(lr=lr, weight_decay=0.0, stochastic_rounding=stochastic_rounding)
    optimizer = make_optimizer(config, model)
    slope = torch.randn(64, 128)  # a gradient that keeps its sign, under noise of its size
    for _ in range(steps):
        model.weight.grad = (slope + torch.randn(64, 128)).to(model.weight.dtype)
        gradient_norm(model, 1.0)
        step_if(optimizer, torch.tensor(True), lr)
    return model.weight.detach(), before


def test_small_steps_move_weights_but_in_plain_bfloat16():
    """100 steps at lr 1e-6 on weights of size 0.02."""
    part = {}
    for precision in ("mixed", "bfloat16"):
        after, before = moved_after(100, precision, False, 1e-6)
        part[precision] = float((after != before).float().mean())
    assert part["mixed"] > 0.95
    assert part["bfloat16"] < 0.1


def test_stochastic_rounding_moves_weights_as_far_as_fp32_does_on_average():
    """Not each weight in every run: what one step does to few of them, more steps do to others."""
    pytest.importorskip("torchao.optim")
    with torch.compiler.set_stance("force_eager"):
        after, before = moved_after(100, "bfloat16", True, 1e-6)
    wide, start = moved_after(100, "mixed", False, 1e-6)
    towards = torch.sign(wide - start)
    mine = float(((after - before).float() * towards).mean())
    assert mine == pytest.approx(float((wide - start).abs().mean()), rel=0.1)
    # A step of 1e-6 between numbers 6e-5 or 1.2e-4 apart moves one weight in a hundred.
    assert float((after != before).float().mean()) > 0.5


def test_precisions_by_name():
    assert [parameter_dtype(p) for p in PRECISIONS] == [
        torch.float32, torch.float32, torch.bfloat16
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"precision: expected one of mixed.*got 'half'"):
        parameter_dtype("half")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sharded", [False, True])
def test_autocast_where_weights_are_whole(precision, sharded):
    with autocast(precision, CPU, sharded):
        assert torch.is_autocast_enabled("cpu") == (precision == "mixed" and not sharded)


def test_the_warning_says_which_weights_stay():
    """Weights beside the size that it names: larger ones stay, much smaller ones move."""
    assert rounding_warning("mixed", False, 1e-6) is None
    assert rounding_warning("bfloat16", True, 1e-6) is None
    warning = rounding_warning("bfloat16", False, 1e-6)
    assert "larger than 0.0005 or so" in warning
    for size, moves in ((0.0003, True), (0.0011, False)):
        weight = torch.tensor(size, dtype=torch.bfloat16)
        assert bool((weight - 1e-6) != weight) == moves
