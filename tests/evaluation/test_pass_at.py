"""avg@k and pass@k, by counting."""

from itertools import combinations
from statistics import mean, stdev

import pytest
import torch

from stars_fast.evaluation.pass_at import mean_score, pass_at, sample_scores


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_right_one(right, k):
    verdicts = [1] * right + [0] * (5 - right)
    choices = list(combinations(verdicts, k))
    share = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at(5, right, k) == pytest.approx(share)


def test_pass_at_k_is_unbiased():
    """Of problems answered right with chance p, 1 - (1 - p)^k on average."""
    torch.manual_seed(0)
    p, k = 0.3, 4
    drawn = torch.binomial(torch.full((20000,), 8.0), torch.full((20000,), p)).int().tolist()
    found = mean_score([pass_at(8, right, k) for right in drawn])
    assert abs(found.value - (1 - (1 - p) ** k)) < 4 * found.stderr


def test_scores_of_samples_are_those_of_problems():
    verdicts = {0: [1, 0, 0, 1], 3: [0, 0, 0, 0], 4: [1, 1, 1, 1]}
    average, passed = sample_scores(verdicts, 4)
    shares = [0.5, 0.0, 1.0]
    assert average.value == pytest.approx(mean(shares))
    assert average.stderr == pytest.approx(stdev(shares) / 3**0.5)
    assert list(passed) == [1, 2, 4]
    assert passed[1] == average
    chances = [1 - 1 / 6, 0.0, 1.0]  # of 6 pairs one has no right answer
    assert passed[2].value == pytest.approx(mean(chances))
    assert passed[2].stderr == pytest.approx(stdev(chances) / 3**0.5)
    assert passed[4].value == pytest.approx(2 / 3)


def test_samples_without_a_verdict_are_left_out():
    average, passed = sample_scores({0: [1], 1: [0, 0, 0], 2: []}, 3)
    assert average.value == pytest.approx(0.5)
    assert {k: score.value for k, score in passed.items()} == {1: 0.5, 2: 0.5, 3: 0.5}
    assert mean_score([0.25]) == (0.25, None)
    with pytest.raises(ValueError, match="values: expected a problem at least"):
        sample_scores({0: []}, 2)


def test_what_is_no_verdict_has_an_average_alone():
    average, passed = sample_scores({0: [0.5, 0.25], 1: [1.0, 0.0]}, 2)
    assert average.value == pytest.approx(0.4375)
    assert passed == {}


def test_values_out_of_range_are_named():
    with pytest.raises(ValueError, match=r"k: expected a value in 1\.\.3, got 4"):
        pass_at(3, 1, 4)
    with pytest.raises(ValueError, match=r"right: expected a value in 0\.\.3, got 4"):
        pass_at(3, 4, 1)
