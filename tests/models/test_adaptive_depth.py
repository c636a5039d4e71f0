"""Turns until rest, on maps whose fixed points are known, and in the looped model."""

import pytest
import torch
from torch import nn

from stars_fast.models.adaptive import AdaptiveDepth, rested, turns_until_rest
from stars_fast.models.looped import LoopedConfig, LoopedLM


class Halving:
    """Each token's state moves to 1 by its own rate a turn; the rows of each call are noted."""

    def __init__(self, rates):
        self.rates, self.rows = rates, []

    def __call__(self, h):
        self.rows.append(len(h))
        rates = h[..., 1:]  # the second entry of a state is its rate
        return torch.cat((1 + (h[..., :1] - 1) * rates, rates), -1)


def states(rates):
    """h^(0) [B, S, 2]: 0, and the rate."""
    rates = torch.tensor(rates, dtype=torch.float64).unsqueeze(-1)
    return torch.cat((torch.zeros_like(rates), rates), -1)


def expected_turns(rate, tol, limit):
    x = 0.0
    for turn in range(1, limit + 1):
        before, x = x, 1 + (x - 1) * rate
        if abs(x - before) <= tol * (x * x + rate * rate) ** 0.5:
            return turn
    return limit


RATES = [[0.1, 0.5, 0.3], [0.2, 0.1, 0.2], [0.95, 0.1, 0.1]]


def test_a_sequence_stops_when_its_last_token_rests_and_leaves_the_batch():
    h, tol, limit = states(RATES), 1e-3, 12
    block = Halving(RATES)
    out, turns = turns_until_rest(lambda rows: block, h, limit, tol)
    wanted = [max(expected_turns(rate, tol, limit) for rate in row) for row in RATES]
    assert turns.tolist() == [[turn] * 3 for turn in wanted]
    assert len(set(wanted)) == 3
    assert block.rows == [sum(turn > done for turn in wanted) for done in range(max(wanted))]
    for row, turn in enumerate(wanted):
        x = h[row : row + 1]
        for _ in range(turn):
            x = Halving(RATES)(x)
        assert torch.equal(out[row : row + 1], x)


def test_per_token_each_stops_by_itself():
    h, tol, limit = states(RATES), 1e-3, 12
    out, turns = turns_until_rest(lambda rows: Halving(RATES), h, limit, tol, "token")
    wanted = [[expected_turns(rate, tol, limit) for rate in row] for row in RATES]
    assert turns.tolist() == wanted
    expected = 1 - torch.tensor(RATES, dtype=torch.float64) ** torch.tensor(wanted)
    torch.testing.assert_close(out[..., 0], expected)


@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("tol", [None, 0.0, 1e-30])
def test_without_a_tolerance_all_turns_are_taken(per, tol):
    h = states(RATES)
    out, turns = turns_until_rest(lambda rows: Halving(RATES), h, 5, tol, per)
    assert turns.eq(5).all()
    torch.testing.assert_close(out[..., 0], 1 - torch.tensor(RATES, dtype=torch.float64) ** 5)


def test_pads_hold_nobody_up():
    h = states([[0.9, 0.1], [0.1, 0.1]])
    real = torch.tensor([[False, True], [True, True]])
    _, turns = turns_until_rest(lambda rows: Halving(None), h, 50, 1e-3, real=real)
    assert turns[0].tolist() == turns[1].tolist()
    assert int(turns.max()) < 10
    _, turns = turns_until_rest(lambda rows: Halving(None), h, 50, 1e-3)
    assert int(turns[0, 0]) > 20


def test_a_change_is_relative_to_the_new_state():
    before = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]]])
    after = torch.tensor([[[3.0, 4.4], [0.0, 0.0], [0.0, 0.0]]])
    assert rested(before, after, 0.07).tolist() == [[False, True, False]]
    assert rested(before, after, 0.08).tolist() == [[True, True, False]]
    tiny = torch.full((1, 1, 4), 1e-5, dtype=torch.float16)  # its square is 0 in fp16
    assert rested(tiny, 3 * tiny, 0.5).tolist() == [[False]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.1), "turns: expected an integer >= 1, got 0"),
        ((3, -0.1), "tol: expected a number"),
        ((3, 0.1, "batch"), "tol_per: expected one of .*got 'batch'"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveDepth(states(RATES), *arguments)


# -- the looped model


@pytest.fixture
def lm():
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "max_length": 12, "d_model": 16, "n_heads": 4, "d_ff": 24}
    lm = LoopedLM(LoopedConfig(**sizes, placement="post")).double().eval()
    for parameter in lm.parameters():
        nn.init.normal_(parameter, std=0.15)
    return lm


def prompts(*shape):
    return torch.randint(13, shape, generator=torch.Generator().manual_seed(1))


def test_per_token_is_causal(lm):
    """So one pass over a whole sequence judges what generation does."""
    tokens = prompts(4, 9)
    _, turns = turns_until_rest(lambda rows: lm.block, lm.prelude(tokens), 60, 1e-3, "token")
    assert len(turns.unique()) > 2
    assert int(turns.max()) < 60
    logits = lm(tokens, 60, tol=1e-3, tol_per="token")
    for length in (1, 4, 8):
        shorter = lm(tokens[:, :length], 60, tol=1e-3, tol_per="token")
        torch.testing.assert_close(shorter, logits[:, :length], rtol=1e-10, atol=1e-10)


def test_a_small_tolerance_gives_the_logits_of_the_fixed_point(lm):
    tokens = prompts(3, 7)
    for per in ("sequence", "token"):
        near = lm(tokens, 200, tol=1e-9, tol_per=per)
        torch.testing.assert_close(near, lm(tokens, 200), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_generation_of_a_row_does_not_depend_on_the_others_or_on_pads(lm, per):
    tokens, lengths = prompts(3, 6), torch.tensor([6, 3, 4])
    options = {"turns": 50, "max_new_tokens": 5, "tol": 3e-2, "tol_per": per}
    together = lm.generate(tokens, lengths=lengths, **options)
    for row, length in enumerate(lengths.tolist()):
        alone = lm.generate(tokens[row : row + 1, :length], **options)
        assert together[row, : length + 5].tolist() == alone[0].tolist()
