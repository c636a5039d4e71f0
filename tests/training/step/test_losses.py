import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stars_fast.base.seeds import derive
from stars_fast.models.loop import token_loss
from stars_fast.training.step.penalties.l2_step import adjacent_l2
from stars_fast.training.step.penalty import PenaltyConfig
from stars_fast.training.step.turns import run_turns


def test_token_loss_is_the_sum_over_supervised_positions():
    torch.manual_seed(0)
    h, head = torch.randn(3, 4, 8), nn.Linear(8, 5)
    targets = torch.tensor([[-100, 1, 2, -100], [0, -100, -100, -100], [-100, -100, 4, 3]])
    positions = (targets.flatten() != -100).nonzero().squeeze(1)
    rows = []

    def counting_head(x):
        rows.append(len(x))
        return head(x)

    loss = token_loss(counting_head, h, positions, targets.flatten()[positions])
    expected = F.cross_entropy(head(h).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert rows == [5]


def test_token_loss_is_taken_in_float32_at_least():
    h = torch.randn(1, 2, 8, dtype=torch.bfloat16)
    loss = token_loss(lambda x: x, h, torch.tensor([0, 1]), torch.tensor([3, 4]))
    assert loss.dtype == torch.float32


def test_l2_between_adjacent_states_counts_samples_alike():
    states = [torch.zeros(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 3, 4)]
    assert float(adjacent_l2(states)) == pytest.approx(0.5)
    states[1][1, 2] = 100.0  # a padded place
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert float(adjacent_l2(states, mask)) == pytest.approx(0.5)


def test_l2_counts_packed_documents_alike():
    states = [torch.zeros(1, 6, 2), torch.ones(1, 6, 2)]
    states[1][0, 4:] = 3.0
    bounds = torch.tensor([0, 4, 6])
    assert float(adjacent_l2(states, cu_seqlens=bounds)) == pytest.approx((1 + 9) / 2)


@pytest.mark.parametrize("backprop", [None, 1, 2, 5, 9])
def test_truncated_turns_have_the_same_state_and_only_the_last_in_the_graph(backprop):
    torch.manual_seed(0)
    block, h = nn.Linear(4, 4), torch.randn(2, 3, 4, requires_grad=True)
    states = run_turns(block, h, 5, backprop)
    kept = min(backprop or 5, 5)
    assert len(states) == kept + 1

    expected = h
    for turn in range(5):
        expected = block(expected.detach() if turn == 5 - kept and kept < 5 else expected)
    torch.testing.assert_close(states[-1], expected)
    got = torch.autograd.grad(states[-1].sum(), [block.weight, h])
    want = torch.autograd.grad(expected.sum(), [block.weight, h], allow_unused=True)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], torch.zeros_like(h) if want[1] is None else want[1])


def test_weight_starts_and_ramps():
    config = PenaltyConfig(weight=0.4, start_step=2, ramp_steps=4)
    weights = [config.weight_at(step) for step in range(8)]
    assert weights == pytest.approx([0, 0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert PenaltyConfig(weight=0.4).weight_at(0) == 0.4


@pytest.mark.parametrize(("weighting", "total"), [("convex", 0.75 * 8 + 2), ("additive", 8 + 2)])
def test_weighted_sum(weighting, total):
    config = PenaltyConfig(weighting=weighting)
    assert float(config.combine(torch.tensor(8.0), torch.tensor(8.0), 0.25)) == total


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weighting": "sum"}, "weighting: expected one of"),
        ({"normalize": "token"}, "normalize: expected one of"),
        ({"at": "first"}, "at: expected one of"),
        ({"at": "last"}, "detach: expected false with at=last"),
        ({"fraction": 0.0}, r"fraction: expected a value in \(0, 1\]"),
        ({"draw": "rows"}, r"draw: expected one of"),
        ({"direction": "last"}, r"direction: expected one of"),
        ({"power_steps": 0}, "power_steps: expected at least 1"),
        ({"start_step": -1}, "start_step: expected at least 0"),
        ({"weight": -0.1}, "weight: expected >= 0"),
        ({"weight": 1.1}, "<= 1 with convex"),
    ],
)
def test_penalty_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        PenaltyConfig(**wrong)
    assert PenaltyConfig(weight=1.1, weighting="additive").weight == 1.1


def test_streams_have_seeds_of_their_own():
    seeds = {derive(0, "a", 1), derive(0, "a", 2), derive(0, "b", 1), derive(1, "a", 1)}
    assert len(seeds) == 4
    assert derive(0, "a", 1) == derive(0, "a", 1)
    assert all(0 <= seed < 2**63 for seed in seeds)
