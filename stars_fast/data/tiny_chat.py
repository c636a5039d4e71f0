"""Chats that the package makes: sums of a few numbers, added up one by one.

A model of a few thousand weights learns their wording at once and the sums in time. The number of
summands varies, and with it the length.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stars_fast.base.checks import check_integer

DEFAULT_ROWS = 2_000

MAX_SUMMANDS = 24


def tiny_chats(rows: int, seed: int) -> Iterator[dict[str, str]]:
    """`rows` chats, each a `problem` and its `solution`; a pure function of the arguments.

    The number of summands is 2 with probability 1/4, and then falls by a quarter with each one
    more, up to `MAX_SUMMANDS`; summands are from 1 to 9.

    Raises:
        ValueError: negative arguments.
    """
    check_integer("rows", rows, 0)
    check_integer("seed", seed, 0)
    rng = np.random.default_rng(seed)
    for _ in range(rows):
        count = min(1 + int(rng.geometric(0.25)), MAX_SUMMANDS)
        first, *others = rng.integers(1, 10, count).tolist()
        total, steps = first, []
        for number in others:
            steps.append(f"{total} + {number} = {total + number}")
            total += number
        yield {
            "problem": f"What is {' + '.join(map(str, (first, *others)))}?",
            "solution": "\n".join([*steps, f"The answer is {total}."]),
        }


def write_tiny_chats(path: str | Path, rows: int, seed: int) -> None:
    """Write `tiny_chats` to `path`, one JSON object a line."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(chat) + "\n" for chat in tiny_chats(rows, seed))
