import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stars_fast.data.packing import efficiency, pack


def maths_like(count):
    """Lengths as of worked solutions: log-normal, mean 650, cut off at 2048."""
    drawn = np.random.default_rng(0).lognormal(6.3, 0.6, count)
    return np.clip(drawn.astype(np.int64) + 1, 1, 2048)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=80), st.integers(40, 90), st.integers(0, 5))
def test_every_document_once_and_no_row_overfull(lengths, row_length, seed):
    rows = pack(lengths, row_length, seed)
    documents = [i for row in rows for i in row.tolist()]
    assert sorted(documents) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < u <= row_length for u in used)
    # Best fit opens a row only for what fits nowhere, so no two rows fit into one.
    assert all(a + b > row_length for a, b in zip(sorted(used), sorted(used)[1:], strict=False))
    assert efficiency(rows, lengths, row_length) == (
        pytest.approx(sum(used) / (len(rows) * row_length)) if rows else 1.0
    )


def test_a_document_goes_where_it_leaves_the_least_room():
    rows = pack([70, 60, 40, 30], 100, seed=0)
    assert sorted(sorted(row.tolist()) for row in rows) == [[0, 3], [1, 2]]


def test_efficiency_and_speed_on_400_thousand_documents():
    lengths = maths_like(400_000)
    start = time.process_time()
    rows = pack(lengths, 2048, seed=0)
    seconds = time.process_time() - start
    assert efficiency(rows, lengths, 2048) > 0.99
    assert seconds < 5
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(400_000))


def test_longer_rows_waste_less():
    lengths = maths_like(20_000)
    found = [efficiency(pack(lengths, n, 0), lengths, n) for n in (2048, 4096, 8192)]
    assert found == sorted(found)
    assert found[-1] > 0.999


def test_rows_are_a_function_of_the_arguments():
    lengths = maths_like(1_000)
    first, again, other = (pack(lengths, 2048, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert {frozenset(row.tolist()) for row in first} != {frozenset(row.tolist()) for row in other}
    # Rows are opened by ever shorter documents, but do not come in that order.
    longest = [lengths[row].max() for row in first]
    assert longest != sorted(longest, reverse=True)
    assert first[0].dtype == np.int64


def test_documents_as_long_as_a_row():
    rows = pack([8, 8, 8], 8, seed=0)
    assert sorted(row.tolist() for row in rows) == [[0], [1], [2]]
    assert pack([], 8, seed=0) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3, 9], 8, 0), "lengths: expected values from 1 to row_length, 8, got 3 to 9"),
        (([0, 3], 8, 0), "lengths: expected values from 1 to row_length, 8, got 0 to 3"),
        (([[1, 2]], 8, 0), r"lengths: expected one dimension, got shape \(1, 2\)"),
        (([1], 0, 0), "row_length: expected an integer >= 1, got 0"),
        (([1], 8, -1), "seed: expected an integer >= 0, got -1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack(*arguments)
