"""Strings of bits: what is predicted, what is unseen, what is refused."""

import numpy as np
import pytest
import torch

from stars_fast.data.batches import micro_batch
from stars_fast.data.kinds.parity import KIND, ParitySection
from stars_fast.data.parity import BitStrings, ParityConfig, draw_strings


def test_every_place_is_predicted_from_the_bits_up_to_it():
    batch = micro_batch(BitStrings(np.array([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]])), np.arange(2))
    assert batch.tokens.tolist() == [[2, 1, 0, 1, 1, 0], [2, 0, 0, 1, 0, 1]]
    assert batch.labels.view(2, 5).tolist() == [[1, 1, 0, 1, 1], [0, 0, 1, 1, 0]]
    assert batch.positions.tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert batch.samples.lengths == [6, 6]
    other = BitStrings(np.array([[1, 0, 1]]), ids=[7, 9, 8]).batch(np.array([0]))
    assert (other.tokens.tolist(), other.targets.tolist()) == (
        [[8, 9, 7, 9]],
        [[-100, 9, 9, 7]],
    )


def test_no_string_is_trained_and_judged_on():
    train, test, longer = draw_strings(ParityConfig(bits=6, train_samples=40, test_samples=20))
    assert (train.shape, test.shape) == ((40, 6), (20, 6))
    assert len({tuple(row) for row in (*train.tolist(), *test.tolist())}) == 60
    assert {name: bits.shape for name, bits in longer.items()} == {"2x": (20, 12), "4x": (20, 24)}
    again, same, _ = draw_strings(ParityConfig(bits=6, train_samples=10, test_samples=20))
    assert np.array_equal(again, train[:10])
    assert np.array_equal(same, test)
    assert not np.array_equal(
        draw_strings(ParityConfig(bits=6, train_samples=40, test_samples=20, seed=1))[0], train
    )


@pytest.mark.parametrize("longer", [(), (3,)])
def test_the_kind_opens_all_lengths(longer):
    section = ParitySection(bits=4, longer=longer, train_samples=10, test_samples=6)
    data = KIND.open(section, None, 0)
    assert KIND.longest(section) == 1 + max([4, *(4 * times for times in longer)])
    assert [len(data.source), len(data.held_out)] == [10, 6]
    assert {name: each.longest for name, each in data.further.items()} == (
        {"3x": 13} if longer else {}
    )
    assert data.unit == "strings of 4 bits"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 0}, "bits: expected an integer >= 1, got 0"),
        ({"bits": 61}, "bits: expected at most 60, got 61"),
        ({"longer": (1,)}, "longer: expected an integer >= 2, got 1"),
        ({"longer": (2, 2)}, "longer: expected different multiples"),
        ({"bits": 6}, "must fit into the 64 strings of 6 bits, got 1,000"),
    ],
)
def test_config_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        ParityConfig(**wrong)


def test_the_parity_of_all_strings_is_the_count_of_ones():
    bits = np.array([[int(digit) for digit in f"{number:06b}"] for number in range(64)])
    targets = BitStrings(bits).batch(np.arange(64)).targets
    counts = torch.tensor([number.bit_count() % 2 for number in range(64)])
    assert torch.equal(targets[:, -1], counts)
