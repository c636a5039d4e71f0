"""How many turns each micro-batch gets: the clipped depth laws of the paper.

Depth is a pure function of (seed, step, micro-batch), so every rank draws the same one and a
resumed run repeats the same ones.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

LAWS = ("lognormal", "poisson", "uniform", "fixed")


@dataclass(frozen=True)
class DepthLaw:
    """A law of the number of turns, an integer in [low, high].

    lognormal: exp(mu + sigma z), rounded to the nearest integer, then clipped.
    poisson: Poisson(rate), clipped. uniform: each integer of [low, high] alike.
    fixed: always `value`.
    """

    law: str = "lognormal"
    mu: float = 1.7
    sigma: float = 0.4
    rate: float = 5.0
    value: int = 4
    low: int = 1
    high: int = 16
    stratified: bool = False

    @cached_property
    def _pmf(self) -> np.ndarray:
        """Probability of each depth 0..high."""
        depth = np.arange(self.high + 1)
        if self.law == "fixed":
            return (depth == min(max(self.value, self.low), self.high)).astype(float)
        if self.law == "uniform":
            return (depth >= self.low) / (self.high - self.low + 1)
        if self.law == "poisson":
            upper = stats.poisson.cdf(depth, self.rate)
        else:
            upper = stats.norm.cdf((np.log(depth + 0.5) - self.mu) / self.sigma)
        upper = np.where(depth < self.low, 0.0, upper)
        upper[-1] = 1.0
        return np.diff(upper, prepend=0.0)

    def pmf(self, depth: int) -> float:
        """Probability of `depth` turns."""
        return float(self._pmf[depth]) if 0 <= depth <= self.high else 0.0

    def mean(self) -> float:
        """Exact mean of the clipped law, in turns."""
        return float(self._pmf @ np.arange(self.high + 1))

    def quantile(self, u: float) -> int:
        """Smallest depth whose cumulative probability exceeds `u` in [0, 1)."""
        return min(int(np.searchsorted(np.cumsum(self._pmf), u, side="right")), self.high)

    def sample(self, seed: int, step: int, micro: int = 0, window: int = 1) -> int:
        """The number of turns of micro-batch `micro` of the `window` ones of step `step`."""
        rng = np.random.Generator(np.random.Philox(key=[seed, step]))
        u = rng.random(window)
        if self.stratified:
            u = (rng.permutation(window) + u) / window
        return self.quantile(float(u[micro]))
