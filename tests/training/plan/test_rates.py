"""The cost model against the one run on a GPU: which of its rows make the rates, and how far off
the predictions of the others are."""

import json
from pathlib import Path

import pytest

import stars_fast.training.plan as package
from benchmarks.calibrate import CALIBRATES, CHECKS, calibrate, main, measured, predict, rounded
from stars_fast.training.plan.cards import cards
from stars_fast.training.plan.rates import rates

ROOT = Path(__file__).parents[3]
RUN = ROOT / "benchmarks" / "results" / "2026-11-28-h200.json"
H200 = cards()["H200"]


@pytest.fixture(scope="module")
def results():
    return json.loads(RUN.read_text())


def test_the_rates_are_those_of_the_run(results):
    written = json.loads(Path(package.__file__).with_name("rates.json").read_text())
    assert written["source"] == RUN.name
    found = calibrate(results, H200)._asdict()
    assert written["rates"] == {name: rounded(value) for name, value in found.items()}
    assert results["copy"][0]["GB/s"] * 1e9 == pytest.approx(H200.copy)


def test_a_run_with_other_sections_is_refused_in_a_line(tmp_path, capsys):
    """As `gpu_check` writes them since."""
    path = tmp_path / "gpu.json"
    path.write_text('{"stages": [], "blocks": [], "ops": [], "turns": []}')
    with pytest.raises(SystemExit):
        main([str(path)])
    assert "results: expected sections copy, row ops, attention" in capsys.readouterr().err


def test_no_row_is_both_made_from_and_checked(results):
    assert not set(CALIBRATES) & set(CHECKS)
    assert {*CALIBRATES, *CHECKS} == measured(results).keys()


@pytest.mark.parametrize("key", CHECKS, ids=lambda key: "-".join(map(str, key)).replace(" ", "-"))
def test_rows_that_made_no_rate_are_predicted_within_15_percent(results, key):
    assert predict(key, H200, rates()) == pytest.approx(measured(results)[key], rel=0.15)


def test_a_wrong_model_would_be_seen(results):
    """Each term matters to a row that is checked: without it that row is off by more than 15 %."""
    whole = rates()
    wrong = {
        "products": whole._replace(products=2 * whole.products),
        "attention": whole._replace(attention={k: 2 * v for k, v in whole.attention.items()}),
        "host": whole._replace(host={k: v / 2 for k, v in whole.host.items()}),
        "eager": whole._replace(eager=2 * whole.eager),
    }
    for name, changed in wrong.items():
        off = [abs(predict(key, H200, changed) / measured(results)[key] - 1) for key in CHECKS]
        assert max(off) > 0.15, name
