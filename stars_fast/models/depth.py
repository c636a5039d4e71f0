"""How many turns each micro-batch gets: the clipped depth laws of the paper, and Huginn's.

A depth is a pure function of (seed, step, micro-batch), so every rank draws the same one without
talking to the others, and a resumed run repeats the same ones without saving a generator.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stars_fast.base.checks import check_integer, check_types


def _special() -> Any:
    """`scipy.special`: a quarter of a second to load, which a fixed depth does not need."""
    from scipy import special

    return special


LAWS = ("lognormal", "poisson", "poisson-lognormal", "uniform", "fixed")


@dataclass(frozen=True)
class DepthLaw:
    """A law of the number of turns, an integer in [low, high].

    law: lognormal, poisson, poisson-lognormal, uniform or fixed.
    mu: of lognormal, mean of the logarithm.
    sigma: of lognormal, standard deviation of the logarithm; of poisson-lognormal, that of the
        rate's logarithm.
    rate: of poisson, its mean before clipping; of poisson-lognormal, the mean of its rates.
    value: of fixed, the number of turns.
    low: smallest number of turns.
    high: largest number of turns.
    stratified: spread the depths of a step's micro-batches over the law.
    curriculum_start: mean number of turns at the first step, where there is a curriculum.
    curriculum_steps: steps over which the mean rises linearly to that of the law; 0 for none.

    "lognormal" is exp(mu + sigma z), z standard normal, rounded to the nearest integer and then
    clipped to [low, high]. (Rounding is what the published code does; mu 1.7, sigma 0.4, [1, 16]
    then has the mean of 5.92 turns that the paper states.) "poisson" is a Poisson draw clipped
    likewise, "uniform" every integer from low to high alike, both included. "poisson-lognormal" is
    1 + a Poisson draw whose own rate is log-normal, exp(log rate - sigma^2 / 2 + sigma z), clipped
    likewise: Huginn's (Geiping et al. 2025, https://arxiv.org/abs/2502.05171; there rate 32, sigma
    0.5, no bounds).

    With `stratified` the micro-batches of one step get depths from different strata of the law,
    so that a step's mean depth varies less; each one alone still follows the law exactly.

    A curriculum multiplies the depths by mean(step) / mean, rounds up or down at random so that
    their mean is kept, and clips to [low, high].

    Raises:
        ValueError: it names the first field that is out of range.
    """

    law: str = "lognormal"
    mu: float = 1.7
    sigma: float = 0.4
    rate: float = 5.0
    value: int = 4
    low: int = 1
    high: int = 16
    stratified: bool = False
    curriculum_start: float = 1.0
    curriculum_steps: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.law not in LAWS:
            raise ValueError(f"law: expected one of {LAWS}, got {self.law!r}")
        for name in ("low", "high", "value"):
            check_integer(name, getattr(self, name), 1)
        if self.high < self.low:
            raise ValueError(f"high: expected at least low={self.low}, got {self.high}")
        if not math.isfinite(self.mu):
            raise ValueError(f"mu: expected a finite number, got {self.mu!r}")
        for name in ("sigma", "rate"):
            number = getattr(self, name)
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name}: expected a positive finite number, got {number!r}")
        check_integer("curriculum_steps", self.curriculum_steps, 0)
        if self.curriculum_steps and self.law == "fixed":
            raise ValueError("curriculum_steps: expected 0 for a fixed law")
        if not 1.0 <= self.curriculum_start < math.inf:
            raise ValueError(
                f"curriculum_start: expected at least 1, got {self.curriculum_start!r}"
            )
        if self.law == "fixed" and not self.low <= self.value <= self.high:
            raise ValueError(
                f"value: expected from low={self.low} to high={self.high}, got {self.value}"
            )

    @cached_property
    def _cumulative(self) -> np.ndarray:
        """P(depth <= k) for k = 0..high."""
        k = np.arange(self.high + 1)
        if self.law == "lognormal":
            below = _special().ndtr((np.log(k + 0.5) - self.mu) / self.sigma)
        elif self.law == "poisson":
            below = _special().pdtr(k, self.rate)
        elif self.law == "poisson-lognormal":
            below = self._poisson_lognormal(k)
        elif self.law == "uniform":
            below = (k - self.low + 1) / (self.high - self.low + 1)
        else:
            below = (k >= self.value).astype(float)
        below = np.where(k < self.low, 0.0, below)
        below[-1] = 1.0
        return below

    def _poisson_lognormal(self, k: np.ndarray) -> np.ndarray:
        """P(1 + Poisson(Lambda) <= k): its mean over Lambda, by the trapezoidal rule in z, which is
        exact to rounding for what falls off as smoothly as this."""
        z = np.linspace(-9.0, 9.0, 3601)
        weights = np.exp(-(z**2) / 2)
        rates = self.rate * np.exp(self.sigma * z - self.sigma**2 / 2)
        below = _special().pdtr(k[:, None] - 1, rates)
        return np.where(k < 1, 0.0, below @ (weights / weights.sum()))

    def pmf(self, depth: int) -> float:
        """Probability of exactly `depth` turns, clipping included."""
        if not self.low <= depth <= self.high:
            return 0.0
        return float(self._cumulative[depth] - self._cumulative[depth - 1])

    def mean(self) -> float:
        """Exact mean of the clipped law, in turns."""
        return float(1 + np.sum(1 - self._cumulative[1:]))

    def _shrink(self, step: int) -> float:
        """The factor of the curriculum on the depths of `step`, at most 1."""
        if step >= self.curriculum_steps:
            return 1.0
        mean = self.mean()
        start = min(self.curriculum_start, mean)
        return (start + (mean - start) * step / self.curriculum_steps) / mean

    def chances(self, step: int) -> list[tuple[int, float]]:
        """The possible depths of `step` with their probabilities."""
        if self.law == "fixed":
            return [(self.value, 1.0)]
        shrink = self._shrink(step)
        found: dict[int, float] = {}
        for depth in range(self.low, self.high + 1):
            whole, part = divmod(depth * shrink, 1.0)
            for turns, share in ((int(whole), 1.0 - part), (int(whole) + 1, part)):
                if share > 0:
                    turns = min(max(turns, self.low), self.high)
                    found[turns] = found.get(turns, 0.0) + share * self.pmf(depth)
        return sorted(found.items())

    @property
    def span(self) -> int | tuple[int, int]:
        """The fixed number of turns, or the fewest and most of 98 % of the law."""
        return self.value if self.law == "fixed" else (self.quantile(0.01), self.quantile(0.99))

    def quantile(self, u: float) -> int:
        """Smallest depth with P(depth' <= depth) > u, for u in [0, 1).

        Raises:
            ValueError: another `u`.
        """
        if not 0 <= u < 1:
            raise ValueError(f"u: expected a value in [0, 1), got {u!r}")
        return int(np.searchsorted(self._cumulative, u, side="right"))

    def sample(self, seed: int, step: int, micro: int = 0, window: int = 1) -> int:
        """Turns of micro-batch `micro` of the `window` micro-batches of optimiser step `step`.

        A pure function of its arguments: the uniforms of a step are the Philox stream with key
        (seed, step). Stratified, micro-batch j takes the stratum p(j) of `window` equal ones, p a
        random permutation: u_j = (p(j) + U_j) / window is uniform by itself.

        Raises:
            ValueError: `seed` or `step` is negative, or `micro` is not in 0..window-1.
        """
        check_integer("seed", seed, 0)
        check_integer("step", step, 0)
        check_integer("window", window, 1)
        check_integer("micro", micro, 0)
        if micro >= window:
            raise ValueError(f"micro: expected less than window={window}, got {micro}")
        rng = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
        u = rng.random(window)
        if self.stratified:
            u = (rng.permutation(window) + u) / window
        depth = self.quantile(float(u[micro]))
        shrink = self._shrink(step)
        if shrink < 1.0:
            depth = math.floor(depth * shrink + rng.random(window)[micro])
        return min(max(depth, self.low), self.high)
