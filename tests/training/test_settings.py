"""Every setting that a task accepts is read by it, and does what it says."""

import json

import pytest
import torch

from stars_fast.data.addition import AdditionData
from stars_fast.evaluation.addition import evaluate
from stars_fast.training.addition import LoopedLoop, load_model
from stars_fast.training.checkpoint import latest, saved_tensors
from stars_fast.training.trainer import train

DTYPES = {  # of weights and averages, and of the states
    "float32": (torch.float32, torch.float32),
    "mixed": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("method", ["sft", "stars", "l2"])
@pytest.mark.parametrize("precision", DTYPES)
def test_the_addition_task_computes_in_its_precision(tiny, monkeypatch, method, precision):
    states = []
    read = LoopedLoop.token_loss
    monkeypatch.setattr(
        LoopedLoop, "token_loss", lambda *args: (states.append(args[1].dtype), read(*args))[1]
    )
    folder = train(tiny(method=method, precision=precision, train={"steps": 2})).folder
    weights, computed = DTYPES[precision]
    assert set(states) == {computed}
    saved = saved_tensors(latest(folder / "checkpoints"))
    kept = {t.dtype for name, t in saved.items() if not name.endswith(".step")}
    assert kept == {weights}
    assert {p.dtype for p in load_model(folder)[0].parameters()} == {weights}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["loss"] > 0 and row["skipped"] == 0 for row in rows)


def test_a_run_in_bf16_is_evaluated_as_it_judged_itself(tiny):
    folder = train(tiny(precision="bfloat16", eval={"turns": [1, 3]})).folder
    said = json.loads((folder / "results.json").read_text())["accuracy"]
    model, config = load_model(folder)
    again = evaluate(model, AdditionData(config.data), [1, 3])
    assert {int(turns): value for turns, value in said.items()} == again


def test_stochastic_rounding_trains_sums(tiny):
    pytest.importorskip("torchao")
    config = tiny(precision="bfloat16", optim={"stochastic_rounding": True}, train={"steps": 2})
    assert train(config).step == 2
