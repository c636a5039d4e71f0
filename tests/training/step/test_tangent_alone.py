"""Of a linear map that ends the turn the penalty after the last turn takes the tangent alone: the
same penalty and gradients for fewer operations, wherever nobody asks for Phi(h)."""

import pytest
import torch
from oracle import relative_error
from tolerances import BLOCK

from benchmarks.counting import count
from stars_fast.models.looped import LoopedLM
from stars_fast.models.looped_config import LoopedConfig
from stars_fast.tokens import Tokens
from stars_fast.training.run.trainer import train
from stars_fast.training.step.penalties.jacobian import jacobian_estimate, jacobian_value
from stars_fast.training.step.penalty import PenaltyConfig

ROWS, LENGTH, WIDTH, INNER = 2, 5, 16, 24


def outcome(penalty, placement, settings):
    """A penalty, the gradients of the block, and the operations of both."""
    torch.manual_seed(0)
    sizes = {"d_model": WIDTH, "n_heads": 2, "d_ff": INNER, "vocab_size": 9, "max_length": LENGTH}
    block = LoopedLM(LoopedConfig(**sizes, placement=placement)).double().block
    h, v = torch.randn(2, ROWS, LENGTH, WIDTH).double()
    samples = Tokens(ROWS, LENGTH, torch.arange(LENGTH) < torch.tensor([[LENGTH], [3]]))
    found = []

    def run():
        found.append(penalty(block, h, v, samples, settings))
        found[0].backward()

    flops = count(run).flops
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in block.parameters()]
    return [*found, *grads], flops


def of_a_pair(*args):
    return jacobian_estimate(*args)[1]


@pytest.mark.parametrize("normalize", ["sample", "batch"])
def test_it_is_the_same_penalty_for_half_of_the_last_map(normalize, taken):
    settings = PenaltyConfig(normalize=normalize, margin=0.01)
    whole, before = outcome(of_a_pair, "pre", settings)
    assert not taken
    alone, after = outcome(jacobian_value, "pre", settings)
    assert len(taken) == 1
    for mine, other in zip(alone, whole, strict=True):
        assert relative_error(mine, other) <= BLOCK
    # Half a map, forward and twice backward, two operations for each of its weights and tokens
    assert before - after == 3 * 2 * INNER * WIDTH * ROWS * LENGTH


def test_a_norm_that_ends_the_turn_needs_both(taken):
    whole, before = outcome(of_a_pair, "post-sandwich", PenaltyConfig())
    found, after = outcome(jacobian_value, "post-sandwich", PenaltyConfig())
    assert (before, taken) == (after, [])
    assert all(map(torch.equal, found, whole))


def test_the_relative_step_needs_the_output(taken):
    settings = PenaltyConfig(fixed_point=0.5)
    whole, found = (outcome(f, "pre", settings)[0] for f in (of_a_pair, jacobian_value))
    assert not taken
    assert all(map(torch.equal, found, whole))


@pytest.mark.parametrize("at", ["next", "last"])
def test_a_run_takes_it_after_its_last_turn_and_not_in_it(tiny, taken, at):
    penalty = {"at": at, "detach": at == "next", "start_step": 1}
    sections = {"model": {"placement": "pre"}, "memory": {"recompute": "none"}}
    train(tiny(penalty=penalty, train={"steps": 3}, **sections))
    assert len(taken) == (2 if at == "next" else 0)
