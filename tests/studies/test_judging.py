"""The figures of a run: what is not finite, what is not settled, and when they are made anew."""

import json
import math

import numpy as np
import pytest
import torch

from stars_fast.analysis.krylov import Radius
from stars_fast.analysis.spectrum import settled_radius, spectral_radius
from stars_fast.base.checkpoints import METADATA, STATE
from stars_fast.data.addition import AdditionConfig, AdditionData
from stars_fast.data.batches import micro_batch
from stars_fast.data.kinds.sums import Sums
from stars_fast.models.families.looped_lm import LoopedLoop
from stars_fast.models.looped import LoopedConfig, LoopedLM
from studies import judging
from studies.judging import judge_run


@pytest.fixture
def folder(tmp_path):
    """A run of Ouro as its folder tells of it."""
    checkpoint = tmp_path / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    for name in (METADATA, STATE):
        (checkpoint / name).touch()
    (tmp_path / "metrics.jsonl").write_text('{"tokens": 100, "tokens_per_second": 50.0}\n')
    (tmp_path / "config.yaml").write_text("task: ouro\ndata: {source: tiny-chat}\n")
    results = {"step": 3, "validation_loss": {"1": 0.5, "2": math.nan, "4": math.inf}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    return tmp_path


def test_losses_that_are_not_finite_are_none(folder):
    found = judge_run(folder, torch.device("cpu"))
    assert found["validation_loss"] == {"1": 0.5, "2": None, "4": None}
    assert found["seconds"] == 2.0
    assert "step" not in found
    json.dumps(found, allow_nan=False)


def test_a_run_is_judged_anew_if_it_was_asked_otherwise(folder, monkeypatch):
    kept = folder / "judged.json"
    judge_run(folder, torch.device("cpu"))
    for lacking in ("radius_turns", "tolerance", None):
        before = json.loads(kept.read_text()) | {"validation_loss": "before"}
        before["asked"].pop(lacking, None)
        kept.write_text(json.dumps(before))
        found = judge_run(folder, torch.device("cpu"))
        assert (found["validation_loss"] == "before") is (lacking is None)


@pytest.fixture(scope="module")
def states():
    """A small model with sums, and the state after a turn."""
    torch.manual_seed(0)
    data = AdditionData(AdditionConfig(digits=1, train_samples=60, test_samples=21))
    batch = data.batch("test", torch.arange(4))
    config = LoopedConfig(32, batch.tokens.shape[1], d_model=16, n_heads=2, d_ff=32)
    model = LoopedLM(config).eval()
    with torch.no_grad():
        return model, batch, model.block(model.prelude(batch.tokens))


def loop_and_batch(model):
    data = AdditionData(AdditionConfig(digits=1, train_samples=60, test_samples=21))
    return LoopedLoop(model), micro_batch(Sums(data, "test"), np.arange(4))


def test_radii_are_those_of_the_analysis(states):
    model, batch, h = states
    mask = batch.mask.clone()
    mask[:, 1:] = False  # the largest radius is another token's
    found = settled_radius(
        model.block, h, mask=mask, generator=torch.Generator().manual_seed(1), tol=judging.TOLERANCE
    )
    generator = torch.Generator().manual_seed(1)
    expected = spectral_radius(
        model.block, h, mask=mask, generator=generator, tol=judging.TOLERANCE
    )
    assert found.settled.all()
    torch.testing.assert_close(found.radius.float(), expected)
    assert (spectral_radius(model.block, h) > 1.01 * expected).any()


@pytest.mark.parametrize(
    ("radii", "settled", "expected"),
    [
        ([0.5, 0.9, 1.0, 2.0], [True, False, True, True], (1.1, 0.5, 0.75)),
        ([0.5, 0.9, 0.7, math.nan], [True, True, True, True], (None, 0.75, 0.75)),
    ],
)
def test_shares_of_the_samples(states, monkeypatch, radii, settled, expected):
    model, _, _ = states
    made = Radius(torch.tensor(radii), torch.tensor(settled))
    monkeypatch.setattr(judging, "settled_radius", lambda *args, **options: made)
    found = judging._states(*loop_and_batch(model))
    for name, value in zip(("radius", "contracting", "settled"), expected, strict=True):
        assert found[name] == dict.fromkeys(
            judging.RADIUS_TURNS, None if value is None else pytest.approx(value)
        )


def test_states_that_overflow_contract_nowhere(states, monkeypatch):
    model, _, _ = states
    monkeypatch.setattr(
        model, "prelude", lambda tokens: torch.full((4, tokens.shape[1], 16), math.inf)
    )
    found = judging._states(*loop_and_batch(model))
    assert found["radius"] == dict.fromkeys(judging.RADIUS_TURNS)
    assert found["contracting"] == found["settled"] == dict.fromkeys(judging.RADIUS_TURNS, 0.0)
    assert set(found["rms"].values()) == {None}
