"""Whole documents in rows of fixed length, with little room left."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from stars_fast.base.checks import check_integer


def pack(lengths: Sequence[int] | np.ndarray, row_length: int, seed: int) -> list[np.ndarray]:
    """Rows of documents, each document in one row, no row longer than `row_length` tokens.

    Best fit, longest documents first: a document goes where it leaves the least room. Which of
    several documents of one length, and the order of the rows, depend on `seed`; nothing else does.

    Args:
        lengths: [N] tokens of each document, from 1 to `row_length`.
        row_length: tokens of a row.
        seed: 0 or more; another one an epoch gives other rows.

    Returns:
        For each row the indices of its documents, int64.

    Raises:
        ValueError: a length out of range, or a bad `row_length` or `seed`.
    """
    check_integer("row_length", row_length, 1)
    check_integer("seed", seed, 0)
    lengths = np.asarray(lengths, np.int64)
    if lengths.ndim != 1:
        raise ValueError(f"lengths: expected one dimension, got shape {lengths.shape}")
    if not len(lengths):
        return []
    if lengths.min() < 1 or lengths.max() > row_length:
        raise ValueError(
            f"lengths: expected values from 1 to row_length, {row_length}, got {lengths.min()} to "
            f"{lengths.max()}"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    places = _best_fit(lengths[order].tolist(), row_length)
    by_row = np.argsort(places, kind="stable")
    rows = np.split(order[by_row], np.flatnonzero(np.diff(places[by_row])) + 1)
    return [rows[i] for i in rng.permutation(len(rows))]


def efficiency(
    rows: Sequence[np.ndarray], lengths: Sequence[int] | np.ndarray, row_length: int
) -> float:
    """Tokens of the documents in `rows` over the places there are, 1 without padding."""
    used = sum(int(np.asarray(lengths)[row].sum()) for row in rows)
    return used / (len(rows) * row_length) if rows else 1.0


def _best_fit(lengths: list[int], row_length: int) -> np.ndarray:
    """The row of each document, for documents in the given order."""
    places = np.empty(len(lengths), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(row_length + 1)]  # rows by the room left
    rooms: list[int] = []  # which of those lists are not empty, ascending
    count = 0
    for i, length in enumerate(lengths):
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rooms[at]
        else:
            room, row = row_length, count
            count += 1
        places[i] = row
        if left := room - length:
            if not rows_with[left]:
                insort(rooms, left)
            rows_with[left].append(row)
    return places
