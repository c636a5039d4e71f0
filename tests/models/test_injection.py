"""Turns of a LoopedLM that take in the prelude's output, windows, and first states of noise."""

import numpy as np
import pytest
import torch

from stars_fast import fused_jvp, looped_block
from stars_fast.data.addition import AdditionConfig, AdditionData
from stars_fast.data.kinds.sums import Sums
from stars_fast.evaluation.adaptive import evaluate_adaptive
from stars_fast.evaluation.addition import evaluate
from stars_fast.models.families.looped_lm import LoopedLoop
from stars_fast.models.first_state import _noise_block, placed_noise
from stars_fast.models.looped import LoopedLM
from stars_fast.models.looped_config import LoopedConfig

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])


def model_of(**changes):
    torch.manual_seed(0)
    config = {"d_model": 8, "n_heads": 2, "d_ff": 16, "injection": "adapter", **changes}
    model = LoopedLM(LoopedConfig(14, 12, **config)).double().eval()
    if model.adapter is not None:
        torch.nn.init.normal_(model.adapter.linear.weight, std=0.3)
    return model


@pytest.mark.parametrize("injection", ["add", "adapter"])
def test_a_fixed_point_reads_its_tokens_only_with_an_injection(injection):
    """Where a turn contracts, its last state is that of any start; with an injection it still
    depends on the tokens."""
    apart = {}
    for name in ("none", injection):
        model = model_of(injection=name, placement="pre")
        with torch.no_grad():
            for parameter in model.block.parameters():
                parameter.mul_(0.2)
            for place, layer in enumerate(model.block):  # h -> h / 2 + f(h)
                layer.register_forward_hook(lambda module, args, out: out - 0.7 * args[0])
                assert place == 0
            ends = model.states(TOKENS, 200)[-1]
        apart[name] = float((ends[0] - ends[1]).norm() / ends.norm())
    assert apart["none"] < 1e-6
    assert apart[injection] > 1e-2


@torch.no_grad()
def test_an_adapter_starts_as_the_turn_without():
    plain, adapted = model_of(injection="none"), model_of()
    adapted.adapter.linear.weight.copy_(adapted.adapter.start())
    torch.testing.assert_close(adapted(TOKENS, 3), plain(TOKENS, 3))


@torch.no_grad()
@pytest.mark.parametrize("state", ["prelude", "noise"])
def test_an_adapter_that_starts_as_the_inputs_repeats_the_first_turn(state):
    plain, adapted = model_of(injection="none"), model_of(state=state, adapter_start="inputs")
    adapted.adapter.linear.weight.copy_(adapted.adapter.start())
    torch.testing.assert_close(adapted(TOKENS, 3), plain(TOKENS, 1))
    kept = LoopedConfig(14, 12, injection="adapter", state=state, adapter_start="state")
    assert kept.adapter_keeps_state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter_start": "zero"}, "adapter_start: expected one of .* or none, got 'zero'"),
        ({"adapter_start": "state", "injection": "add"}, "expected none with injection add"),
    ],
)
def test_starts_of_an_adapter_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        model_of(**changes)


def test_the_jacobian_is_that_in_the_state_alone():
    model = model_of(window=2, positions="none")
    e = model.prelude(TOKENS).detach()
    turn = looped_block(model, inputs=e)
    h = model.states(TOKENS, 2)[-1].detach()
    v = torch.randn(h.shape, dtype=h.dtype, generator=torch.Generator().manual_seed(1))
    step = 1e-6
    expected = (turn(h + step * v) - turn(h - step * v)) / (2 * step)
    torch.testing.assert_close(fused_jvp(turn, h, v)[1], expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("injection", "given"), [("none", True), ("add", False)])
def test_inputs_that_do_not_fit_are_named(injection, given):
    model = model_of(injection=injection)
    e = model.prelude(TOKENS) if given else None
    with pytest.raises(ValueError, match=r"inputs: expected .*, got"):
        model.turn(e)
    with pytest.raises((ValueError, TypeError), match="inputs"):
        looped_block(model, inputs=e)


@torch.no_grad()
@pytest.mark.parametrize("state", ["prelude", "noise"])
def test_a_prompt_is_continued_alike_alone_and_in_a_batch(state):
    model = model_of(state=state)
    lengths = torch.tensor([6, 4])
    together = model.generate(TOKENS, 4, 3, lengths=lengths, tol=1e-3)
    alone = model.generate(TOKENS[1:, :4], 4, 3, tol=1e-3)
    assert torch.equal(together[1, :7], alone[0, :7])


@torch.no_grad()
def test_rows_that_rest_leave_the_others_their_inputs():
    """Turns of some rows alone read the inputs of those rows."""
    model = model_of(injection="adapter", placement="post")
    deep = model(TOKENS, 300, tol=1e-4)
    rows = torch.cat([model(row[None], 300, tol=1e-4) for row in TOKENS])
    torch.testing.assert_close(deep, rows)
    data = Sums(AdditionData(AdditionConfig(digits=1, train_samples=60, test_samples=21)), "test")
    loop = LoopedLoop(model)
    (point,) = evaluate_adaptive(loop, data, [1e-3], 50, "sequence").values()
    assert point.turns < 50
    (whole,) = evaluate_adaptive(loop, data, [0.0], 50, "sequence").values()
    assert whole.accuracy == evaluate(loop, data, [50])[50]


def test_a_window_hides_what_lies_before_it():
    model = model_of(injection="none", positions="none", window=3)
    h = torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    out = model.block(h)[0, 5]
    (reach,) = torch.autograd.grad(out @ torch.arange(8.0).double(), h)  # a norm fixes their sum
    assert (reach[0].norm(dim=-1) > 0).tolist() == [False, False, False, True, True, True, False]
    whole = model_of(injection="none", positions="none", window=9)
    none = model_of(injection="none", positions="none")
    torch.testing.assert_close(whole.block(h), none.block(h))


@torch.no_grad()
def test_without_positions_a_token_far_in_is_what_it_was_nearer():
    model = model_of(injection="none", positions="none", window=2)
    assert model.positions is None
    row = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    later = model(row, 2)[:, 4:]
    torch.testing.assert_close(later[:, 2:], model(row[:, 4:], 2)[:, 2:])


def test_noise_of_training_is_the_samples_own():
    model = model_of(state="noise").train()
    loop = LoopedLoop(model)
    data = Sums(AdditionData(AdditionConfig(digits=1, train_samples=60, test_samples=21)), "test")
    host = data.batch(np.arange(3))
    first, inputs = loop.begin(host.tokens, host.samples, [5, 6, 7])
    assert torch.equal(inputs, model.prelude(host.tokens))
    assert torch.equal(loop.begin(host.tokens, host.samples, [5, 6, 7]).state, first)
    assert not torch.equal(loop.begin(host.tokens, host.samples, [5, 6, 8]).state[2], first[2])
    model.eval()
    assert torch.equal(*(loop.begin(host.tokens, host.samples).state for _ in range(2)))


def test_noise_is_drawn_where_tokens_are():
    """Not at all places before them: one block of the table, which is that of the whole."""
    whole = placed_noise(torch.arange(200)[None], 8)
    _noise_block.cache_clear()
    assert torch.equal(
        placed_noise(torch.tensor([[130, 131, 129], [0, 5, 70]]), 8)[1, 2], whole[0, 70]
    )
    assert torch.equal(placed_noise(torch.tensor([[150]]), 8)[0, 0], whole[0, 150])
    assert _noise_block.cache_info().misses == 3
    placed_noise(torch.tensor([[1_000_000]]), 8)
    assert _noise_block.cache_info().misses == 4
