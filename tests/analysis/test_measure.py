"""What is measured of whole models, what it is called, and what is said of it."""

import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from looped_maps import MapLoop, rotation, subject

from stars_fast.analysis.jacobian import spectrum
from stars_fast.analysis.measure import Plan, measure
from stars_fast.analysis.report.summary import cycle_periods, median, motions, quartiles, summarise
from stars_fast.analysis.report.words import verdict
from stars_fast.analysis.trajectory import trajectory

PLAN = Plan(turns=40, jacobian_at=(2, 10, 40), probes=4)
TOL = 1e-3


def moved(block, turns=48):
    h = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.manual_seed(0))
    return trajectory(block, h, turns)


def drift(h):
    return h + 1.0


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (lambda h: 1 + 0.5 * (h - 1), "converges"),
        (lambda h: 1 + 0.97 * (h - 1), "slows"),
        (lambda h: 1 - 0.97 * (h - 1), "slows"),
        (rotation(1e-4), "converges"),
        (rotation(9e-4), "wanders"),  # below the tolerance a turn, not over many
        (rotation(2 * math.pi / 5), "cycles"),
        (lambda h: -h, "cycles"),
        (rotation(1.0), "wanders"),
        (rotation(1.0, growth=0.99), "wanders"),  # by 0.83 over the half that is compared
        (rotation(1.0, growth=1.004), "wanders"),  # by 1.1 over the second half
        (drift, "grows"),
        (lambda h: 1.1 * h, "grows"),
        (lambda h: 1e30 * h, "overflows"),
    ],
)
def test_every_kind_of_motion_has_its_name(block, kind):
    assert motions(moved(block), TOL) == [kind] * 3


def test_a_steady_drift_does_not_come_to_rest_however_small_its_steps_against_it():
    found = moved(drift, turns=1500)
    assert found.residual[-1].max() < TOL
    assert motions(found, TOL) == ["grows"] * 3


@pytest.mark.parametrize("period", [2, 3, 7, 12])
def test_the_period_of_a_cycle(period):
    assert cycle_periods(moved(rotation(2 * math.pi / period))) == [period] * 3


def test_what_never_comes_back_has_no_period():
    assert cycle_periods(moved(rotation(1.0))) == [None] * 3
    assert cycle_periods(moved(drift)) == [None] * 3


def test_the_samples_of_all_batches_are_measured_in_their_order():
    whole = subject(rotation(0.6, growth=0.9))
    found = measure(whole, PLAN)
    assert found.trajectory.norm.shape == (41, 4)
    place = 0
    for batch in whole.batches:
        h0 = whole.load().prelude(batch.tokens).detach()
        alone = trajectory(whole.load().block, h0, 40, mask=batch.samples.real)
        part = slice(place, place + len(h0))
        torch.testing.assert_close(found.trajectory.residual[:, part], alone.residual)
        place += len(h0)
        h = h0
        for _ in range(10):
            h = whole.load().block(h)
        again = spectrum(whole.load().block, h.detach(), mask=batch.samples.real, probes=4)
        torch.testing.assert_close(found.jacobian[10].radius[part], again.radius, rtol=1e-3, atol=0)
    torch.testing.assert_close(
        found.jacobian[40].radius, torch.full((4,), 0.9).double(), rtol=1e-3, atol=0
    )
    turn, radius, arpack = found.check
    assert turn == 40
    assert radius == found.jacobian[40].radius[:2].tolist()
    np.testing.assert_allclose(arpack, radius, rtol=2e-3)


def test_the_loss_is_that_of_all_supervised_tokens():
    whole = subject(lambda h: 0.5 * h)
    found = measure(whole, PLAN)
    states = [whole.load().prelude(b.tokens).flatten(0, 1)[b.positions] for b in whole.batches]
    first = torch.cat(states).square().mean(1).mean().item()
    assert found.loss[1] == pytest.approx(first / 4)
    assert found.loss[3] == pytest.approx(first / 64)
    assert list(found.loss) == list(range(1, 41))


@pytest.mark.parametrize(("place", "column"), [("first", 0), ("last", -1)])
def test_the_path_is_that_of_the_chosen_token(place, column):
    whole = subject(lambda h: 0.9 * h)
    found = measure(whole, Plan(turns=4, jacobian_at=(4,), place=place, probes=1))
    ends = [(b, r) for b in whole.batches for r in range(len(b.tokens))]
    starts = []
    for batch, row in ends:
        real = batch.samples.real[row].nonzero().flatten()
        starts.append(whole.load().prelude(batch.tokens)[row, real[column]].detach().numpy())
    paths = found.paths
    np.testing.assert_allclose(
        paths.points[:, 0], (np.stack(starts) - paths.origin) @ paths.axes.T, atol=1e-5
    )


def test_the_tail_is_seen_from_the_last_state():
    found = measure(subject(lambda h: 0.9 * h), Plan(turns=4, jacobian_at=(4,), probes=1))
    np.testing.assert_allclose(found.tail.points[:, -1], 0, atol=1e-7)
    # From turn 2 to 4: 1 - 0.9^2 of the norm at turn 2, the largest.
    size = np.linalg.norm(found.tail.points[:, 0], axis=-1)
    assert (size <= 1 - 0.81 + 1e-6).all()
    assert found.tail.explained.sum() > 0.3


def test_samples_that_meet_have_no_spread():
    whole = subject(lambda h: 1 + 0.5 * (h - 1))
    meets = measure(whole, PLAN)
    tokens = []
    for batch in whole.batches:
        h0 = whole.load().prelude(batch.tokens).detach().double()
        tokens += [h[mask][mask.sum() // 2] for h, mask in zip(h0, batch.samples.real, strict=True)]
    start = torch.stack(tokens)
    for turn in range(10):
        h = 1 + 0.5**turn * (start - 1)
        apart = (h - h.mean(0)).square().sum(1).mean().sqrt()
        expected = apart / h.square().sum(1).mean().sqrt()
        torch.testing.assert_close(meets.spread[turn], expected, rtol=1e-4, atol=0)
    assert meets.spread[-1] < 1e-6
    said = "The token that is followed ends in the same state in all 4 samples drawn."
    assert said in verdict(meets, summarise(meets, TOL), TOL)
    apart = measure(subject(lambda h: h.clone()), PLAN)
    torch.testing.assert_close(apart.spread, apart.spread[:1].expand(41))
    assert "same state" not in verdict(apart, summarise(apart, TOL), TOL)


def test_the_summary_is_of_the_numbers():
    whole = subject(lambda h: 1 + 0.5 * (h - 1), trained=(1, 20))
    found = measure(whole, PLAN)
    summary = summarise(found, TOL)
    assert (summary.base, summary.turns, summary.samples) == (20, 40, 4)
    assert (summary.trained, summary.deepest) == (10, 40)
    assert summary.radius == tuple(median(found.jacobian[t].radius) for t in (10, 40))
    assert summary.residual == tuple(median(found.trajectory.residual[t]) for t in (20, 39))
    assert summary.contracting == summary.measured == summary.converged == 4
    assert summary.growth == pytest.approx(
        median(found.trajectory.norm[40] / found.trajectory.norm[20])
    )
    assert summary.quality == (found.loss[20], found.loss[40])
    assert summary.kinds == {"converges": 4}
    words = verdict(found, summary, TOL)
    assert words.startswith("Contracts at depth: radius below 1 for 4 of 4 samples at turn 40")
    assert "4 of 4 come to rest (residual below 0.001 from turn" in words


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            rotation(0.3, growth=1.2),
            ["Expands at depth: radius below 1 for 0 of 4", "keep growing"],
        ),
        (rotation(2 * math.pi / 5), ["On the edge at depth", "go round in a cycle of 5 turns"]),
        (lambda h: 1e9 * h, ["No Jacobian at turn 40", "4 of 4 overflow, the first at turn 5"]),
        (rotation(1.0), ["4 of 4 move on without settling"]),
        (
            rotation(1.0, growth=0.95),
            ["Contracts at depth", "4 of 4 slow down (their steps still shrink at turn 40)"],
        ),
        (rotation(1.0, growth=1.05), ["Expands at depth"]),
        (rotation(1.0, growth=1.01), ["On the edge at depth"]),
    ],
)
def test_the_verdict_says_what_happens(block, expected):
    found = measure(subject(block), PLAN)
    words = verdict(found, summarise(found, TOL), TOL)
    for part in expected:
        assert part in words


def test_a_small_residual_alone_does_not_count_as_rest():
    summary = summarise(measure(subject(rotation(9e-4)), PLAN), TOL)
    assert summary.residual[1] < TOL
    assert summary.kinds == {"wanders": 4}
    assert (summary.converged, summary.convergence) == (0, None)


def test_growth_is_told_of_the_samples_that_grow():
    def block(h):
        return torch.where(h[:, :1, :1] > 0, 1.6, 0.5) * h

    found = measure(subject(block), PLAN)
    summary = summarise(found, TOL)
    assert summary.kinds["grows"] < 4
    words = verdict(found, summary, TOL)
    assert "Mixed at depth" in words
    assert f"their norm by the factor {1.6**36:.3g} since turn 4 in the median" in words


@pytest.mark.parametrize(("trained", "base", "last"), [(1, 1, 2), (9.0, 9, 2), ((2, 90), 40, 10)])
def test_the_task_is_compared_from_the_training_on_whatever_turns_have_a_jacobian(
    trained, base, last
):
    whole = subject(lambda h: 0.5 * h, trained=trained)
    found = measure(whole, replace(PLAN, jacobian_at=(2, 10)))
    summary = summarise(found, TOL)
    assert (summary.base, summary.trained, summary.deepest) == (base, last, 10)
    assert summary.quality == (found.loss[base], found.loss[40])
    words = verdict(found, summary, TOL)
    assert words.startswith("Contracts: radius below 1 for 4 of 4 samples at turn 10 ")
    assert (f"nats at turn {base}," in words) == (base < 40)


@pytest.mark.parametrize(
    ("quality", "converged", "expected"),
    [
        ((0.2, 0.9), 4, "Accuracy rises from 20.0% at turn 4 to 90.0% at 40."),
        ((0.9, 0.5), 2, "Accuracy falls from 90.0% at turn 4 to 50.0% at 40."),
        ((0.9, 0.85), 4, "Accuracy falls from 90.0% at turn 4 to 85.0% at 40."),
        (
            (0.9, 0.5),
            4,
            "Accuracy falls from 90.0% at turn 4 to 50.0% at 40. So the states come to rest, but "
            "not at the answer.",
        ),
        ((0.0, 0.0), 4, "Accuracy is 0.0% at turn 4 and 0.0% at 40."),
        ((0.9, 0.902), 4, "Accuracy is 90.0% at turn 4 and 90.2% at 40."),
        ((0.9, None), 4, "(residual below 0.001 from turn 10 on in the median)."),
    ],
)
def test_what_becomes_of_the_accuracy_is_said(quality, converged, expected):
    found = measure(subject(rotation(1.0, growth=0.5)), PLAN)
    summary = replace(
        summarise(found, TOL), quality=quality, quality_name="accuracy", converged=converged,
        kinds={"converges": 4}, convergence=9.5, spread=1.0,
    )  # fmt: skip
    words = verdict(found, summary, TOL)
    if quality[1] in (0.0, 0.5):  # what is lost or was never learned comes first
        assert words.startswith(expected)
    else:
        assert words.endswith(f"). {expected}" if quality[1] else expected)


def test_the_model_is_let_go_when_it_is_measured():
    kept = []

    def load():
        loop = MapLoop(lambda h: 0.5 * h, 6)
        kept.append(weakref.ref(loop))
        return loop

    found = measure(replace(subject(None), load=load), PLAN)
    gc.collect()
    assert kept[0]() is None
    assert summarise(found, TOL).samples == 4


def test_progress_is_told():
    said = []
    measure(subject(lambda h: 0.5 * h), PLAN, said.append)
    assert [line for line in said if "batch 2" in line] == [
        "batch 2 of 2: 40 turns",
        *(f"batch 2 of 2: Jacobian after turn {turn}" for turn in (2, 10, 40)),
    ]


def test_arpack_may_find_nothing(monkeypatch):
    def fails(block, h, *, steps, **more):
        assert steps == 10
        raise RuntimeError("spectral_radius: ARPACK found no eigenvalue of sample 0")

    monkeypatch.setattr("stars_fast.analysis.measure.spectral_radius", fails)
    turn, _, arpack = measure(subject(lambda h: 0.5 * h), PLAN).check
    assert turn == 40
    assert np.isnan(arpack).all()


def test_one_finite_point_makes_no_picture():
    found = measure(subject(lambda h: h * math.nan, lengths=(3,)), PLAN)
    assert found.paths is found.tail is None
    assert verdict(found, summarise(found, TOL), TOL).startswith("No Jacobian at turn 40")


def test_a_model_without_a_finite_state_is_measured_all_the_same():
    found = measure(subject(lambda h: h * math.nan), PLAN)
    assert found.jacobian[2].radius.isnan().all()
    assert found.check is None
    assert found.tail is None
    assert summarise(found, TOL).kinds == {"overflows": 4}


def test_a_state_whose_jacobian_overflows_is_measured_all_the_same():
    def block(h):
        return torch.where(h.abs() > 1e20, h * 1e30 * 1e30, 1e12 * h)

    found = measure(subject(block), Plan(turns=4, jacobian_at=(1, 2), probes=2))
    assert found.trajectory.finite[2].all()
    assert found.jacobian[1].radius.isfinite().all()
    assert found.jacobian[2].radius.isnan().any()
    assert summarise(found, TOL).measured < 4


def test_quartiles_are_of_at_least_half_the_samples():
    nan = math.nan
    values = torch.tensor([[1.0, 2, 3, 4, 5], [1, 2, 3, nan, nan], [1, 2, nan, nan, nan]]).double()
    found = quartiles(values)
    assert found[:, 0].tolist() == [2, 3, 4]
    assert found[1, 1] == 2
    assert found[:, 2].isnan().all()
    assert median(torch.tensor([nan, 3.0, 1.0])) == 2
    assert median(torch.tensor([nan])) is None
