"""Scores of several samples a problem: avg@k, the share that is right, and pass@k, the chance that
one of k is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Score(NamedTuple):
    """value: in [0, 1] where the verdicts are. stderr: its standard error; None of one problem."""

    value: float
    stderr: float | None


def mean_score(values: Sequence[float]) -> Score:
    """The mean over problems with its standard error, s / sqrt(n).

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("values: expected a problem at least, got none")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Score(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Score(mean, math.sqrt(variance / len(values)))


def pass_at(samples: int, right: int, k: int) -> float:
    """The chance that one of k samples, drawn from so many without putting back, is right:
    1 - C(samples - right, k) / C(samples, k), the unbiased estimator of Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code" (https://arxiv.org/abs/2107.03374).

    Raises:
        ValueError: k is not in 1..samples, or right not in 0..samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k: expected a value in 1..{samples}, got {k}")
    if not 0 <= right <= samples:
        raise ValueError(f"right: expected a value in 0..{samples}, got {right}")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def sample_scores(
    verdicts: Mapping[int, Sequence[float]], count: int
) -> tuple[Score, dict[int, Score]]:
    """avg@count, and pass@k at 1, 2, 4, ... and `count`.

    A problem with fewer verdicts than k, as some samples could not be judged, takes part in pass@k
    with all it has, which is a lower bound; one without any takes no part.

    Args:
        verdicts: of the samples of each problem.
        count: samples that were made of each.

    Returns:
        pass@k is empty unless all verdicts are 0 or 1.

    Raises:
        ValueError: there is no verdict.
    """
    judged = [given for given in verdicts.values() if given]
    average = mean_score([math.fsum(given) / len(given) for given in judged])
    if any(verdict not in (0, 1) for given in judged for verdict in given):
        return average, {}
    sizes = [2**i for i in range(count.bit_length()) if 2**i < count] + [count]
    return average, {
        k: mean_score([pass_at(len(g), round(sum(g)), min(k, len(g))) for g in judged])
        for k in sizes
    }
