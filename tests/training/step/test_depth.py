import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
from scipy import stats

from stars_fast.models.depth import DepthLaw

LAWS = {
    "ouro": DepthLaw("lognormal", mu=1.7, sigma=0.4, low=1, high=16),
    "addition": DepthLaw("lognormal", mu=2.0, sigma=0.7, low=1, high=100),
    "lognormal-2.62": DepthLaw("lognormal", mu=2.62, sigma=0.6, low=1, high=40),
    "lognormal-3.2": DepthLaw("lognormal", mu=3.2, sigma=0.45, low=1, high=80),
    "lognormal-low-3": DepthLaw("lognormal", mu=1.0, sigma=0.8, low=3, high=6),
    "poisson-5": DepthLaw("poisson", rate=5.0, low=1, high=30),
    "poisson-10": DepthLaw("poisson", rate=10.0, low=1, high=30),
    "huginn": DepthLaw("poisson-lognormal", rate=32.0, sigma=0.5, low=1, high=120),
    "retrofitted-4": DepthLaw("poisson-lognormal", rate=4.0, sigma=0.5, low=2, high=12),
    "uniform-10": DepthLaw("uniform", low=1, high=10),
    "uniform-2-7": DepthLaw("uniform", low=2, high=7),
    "fixed": DepthLaw("fixed", value=4),
}
each_law = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)


def drawn_directly(law, count):
    """The law's definition with another generator: draw, round, clip."""
    rng = np.random.default_rng(7)
    if law.law == "lognormal":
        draws = np.round(np.exp(law.mu + law.sigma * rng.standard_normal(count)))
    elif law.law == "poisson":
        draws = rng.poisson(law.rate, count)
    elif law.law == "poisson-lognormal":
        mean = np.log(law.rate) - law.sigma**2 / 2
        draws = rng.poisson(rng.lognormal(mean, law.sigma, count)) + 1
    elif law.law == "uniform":
        draws = rng.integers(law.low, law.high + 1, count)
    else:
        draws = np.full(count, law.value)
    return np.clip(draws, law.low, law.high).astype(int)


def agrees_with_pmf(law, draws):
    """Chi-square of the draws against the pmf, cells with fewer than five expected merged."""
    depths = np.arange(law.high + 1)
    expected = np.array([law.pmf(k) for k in depths.tolist()]) * len(draws)
    observed = np.bincount(draws, minlength=law.high + 1)
    assert observed[expected == 0].sum() == 0
    if (expected > 0).sum() == 1:
        return
    common = expected >= 5
    expected = np.append(expected[common], expected[~common].sum())
    observed = np.append(observed[common], observed[~common].sum())
    kept = expected > 0
    # One in ten thousand: with fixed seeds the test either always passes or never.
    assert stats.chisquare(observed[kept], expected[kept]).pvalue > 1e-4


@each_law
def test_pmf_is_the_law_drawn_directly(law):
    agrees_with_pmf(law, drawn_directly(law, 50_000))
    assert sum(law.pmf(k) for k in range(-1, law.high + 2)) == pytest.approx(1, abs=1e-12)


@each_law
def test_mean_is_the_mean_of_the_pmf(law):
    assert law.mean() == pytest.approx(sum(k * law.pmf(k) for k in range(1, law.high + 1)))


def test_the_papers_mean_depth():
    assert LAWS["ouro"].mean() == pytest.approx(5.92, abs=0.005)


def test_huginns_mean_depth():
    """That of 1 + Lambda where no bound cuts anything off."""
    law = DepthLaw("poisson-lognormal", rate=32.0, sigma=0.5, low=1, high=1000)
    assert law.mean() == pytest.approx(33, abs=1e-9)


@each_law
def test_samples_follow_the_pmf(law):
    agrees_with_pmf(law, np.array([law.sample(3, step) for step in range(4000)]))


@pytest.mark.parametrize("micro", [0, 3])
@pytest.mark.parametrize("name", ["ouro", "poisson-5", "uniform-10"])
def test_stratified_has_the_same_marginal_law(name, micro):
    law = DepthLaw(**(asdict(LAWS[name]) | {"stratified": True}))
    agrees_with_pmf(law, np.array([law.sample(5, step, micro, 4) for step in range(4000)]))


def test_stratified_window_holds_one_draw_of_every_stratum():
    law = DepthLaw("uniform", low=1, high=8, stratified=True)
    orders = set()
    for step in range(50):
        depths = tuple(law.sample(0, step, micro, 8) for micro in range(8))
        assert sorted(depths) == list(range(1, 9))
        orders.add(depths)
    assert len(orders) == 50


def test_stratified_steps_vary_less():
    def spread(stratified):
        law = DepthLaw(stratified=stratified)
        return np.std([np.mean([law.sample(0, s, m, 8) for m in range(8)]) for s in range(200)])

    assert spread(True) < 0.5 * spread(False)


@pytest.mark.parametrize("stratified", [False, True])
def test_pure_function_across_processes_and_call_orders(stratified):
    law = DepthLaw(stratified=stratified)
    arguments = [(seed, step, micro, 4) for seed in (0, 9) for step in (0, 5) for micro in range(4)]
    here = [law.sample(*a) for a in reversed(arguments)][::-1]
    program = (
        "import json; from stars_fast.models.depth import DepthLaw;"
        f"print(json.dumps([DepthLaw(stratified={stratified}).sample(*a) for a in {arguments}]))"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(there.stdout) == here
    assert len(set(here)) > 1


def test_seeds_and_steps_are_different_streams():
    law = DepthLaw("uniform", low=1, high=1000)
    draws = {law.sample(seed, step, m, 2) for seed in (1, 2) for step in (1, 2) for m in (0, 1)}
    assert len(draws) == 8


RANKS, WINDOW, STEPS = 4, 32, 60


def test_ranks_of_the_same_depths_wait_for_no_one():
    """How much longer a step takes because the ranks wait for the deepest: the largest total depth
    of a rank over the mean of the ranks, for the paper's law, 4 ranks and 32 micro-batches each.

    Compared are ranks with draws of their own, as in the published code, which here are draws of
    different seeds; and ours, which have one seed and so the same depths. If a rank did have draws
    of its own, those of stratified steps would still be alike. The last compares steps, not ranks:
    how far the total depth of a stratified step is from the law's."""

    def totals(seeds, stratified):
        law = DepthLaw(stratified=stratified)
        micros = range(WINDOW)
        return np.array(
            [
                [sum(law.sample(seed, step, micro, WINDOW) for micro in micros) for seed in seeds]
                for step in range(STEPS)
            ]
        )

    def imbalance(drawn):
        return float((drawn.max(1) / drawn.mean(1)).mean())

    independent = totals(range(RANKS), False)
    assert imbalance(independent) == pytest.approx(1.077, abs=0.02)
    stratified = totals(range(RANKS), True)
    assert imbalance(stratified) <= 1.02

    expected = WINDOW * DepthLaw().mean()
    assert np.std(stratified / expected) <= 0.02
    assert np.std(independent / expected) > 0.06
    assert (stratified.max(1) / expected).mean() <= 1.02


@pytest.mark.parametrize("step", [0, 30, 99, 100, 150])
def test_the_mean_depth_of_a_curriculum_rises_to_the_laws(step):
    law = DepthLaw(curriculum_start=2.0, curriculum_steps=100)
    chances = dict(law.chances(step))
    mean = sum(depth * chance for depth, chance in chances.items())
    assert sum(chances.values()) == pytest.approx(1)
    # A little more than planned where depths below 1 are clipped.
    planned = 2.0 + (law.mean() - 2.0) * min(step / 100, 1.0)
    assert mean == pytest.approx(planned, rel=0.01)
    if step >= 100:
        assert mean == pytest.approx(law.mean(), rel=1e-12)
        assert chances == pytest.approx({depth: law.pmf(depth) for depth in range(1, 17)})
    draws = np.array([law.sample(seed, step) for seed in range(1500)])
    assert abs(draws.mean() - mean) < 3.5 * draws.std() / len(draws) ** 0.5
    counted = np.bincount(draws, minlength=law.high + 1)
    assert all(chances.get(depth, 0.0) > 0 for depth in np.flatnonzero(counted))
    likely = [depth for depth in chances if 1500 * chances[depth] >= 5]
    rest = 1500 - counted[likely].sum()
    expected = [1500 * chances[depth] for depth in likely]
    observed = [*counted[likely], rest]
    assert stats.chisquare(observed, [*expected, 1500 - sum(expected)]).pvalue > 1e-4


def test_a_curriculum_starts_at_most_at_the_laws_mean():
    law = DepthLaw("uniform", low=1, high=3, curriculum_start=9.0, curriculum_steps=10)
    assert dict(law.chances(0)) == pytest.approx({depth: law.pmf(depth) for depth in (1, 2, 3)})


def test_quantile_inverts_the_cumulative_law():
    law = LAWS["ouro"]
    below = 0.0
    for depth in range(1, law.high + 1):
        above = below + law.pmf(depth)
        assert law.quantile((below + above) / 2) == depth
        below = above
    assert law.quantile(np.nextafter(1, 0)) == law.high
    assert law.quantile(0.0) == law.low


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"law": "normal"}, r"law: expected one of .* got 'normal'"),
        ({"low": 0}, "low: expected an integer >= 1, got 0"),
        ({"high": 2.5}, "high: expected an integer, got 2.5"),
        ({"low": 5, "high": 4}, "high: expected at least low=5, got 4"),
        ({"sigma": 0.0}, "sigma: expected a positive finite number, got 0.0"),
        ({"law": "poisson", "rate": -1.0}, "rate: expected a positive finite number, got -1.0"),
        ({"mu": float("nan")}, "mu: expected a finite number, got nan"),
        ({"curriculum_steps": -1}, "curriculum_steps: expected an integer >= 0, got -1"),
        ({"curriculum_start": 0.5}, "curriculum_start: expected at least 1, got 0.5"),
        ({"law": "fixed", "curriculum_steps": 5}, "curriculum_steps: expected 0 for a fixed law"),
        (
            {"law": "fixed", "value": 20},
            r"value: expected from low=1 to high=16, got 20",
        ),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DepthLaw(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0), "seed: expected an integer >= 0, got -1"),
        ((0, -1), "step: expected an integer >= 0, got -1"),
        ((0, 0, 4, 4), "micro: expected less than window=4, got 4"),
        ((0, 0, 0, 0), "window: expected an integer >= 1, got 0"),
    ],
)
def test_sample_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        DepthLaw().sample(*arguments)


def test_quantile_error():
    with pytest.raises(ValueError, match=r"u: expected a value in \[0, 1\), got 1.0"):
        DepthLaw().quantile(1.0)
