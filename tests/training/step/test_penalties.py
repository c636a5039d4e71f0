"""A penalty that is one file: what a run, its cost, its memory and its messages ask of it."""

from typing import NamedTuple

import pytest
import torch

from stars_fast.base.checkpoints import latest, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.training.run import trainer
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.trainer import train
from stars_fast.training.step.cost import relative_cost
from stars_fast.training.step.methods import METHODS, penalty_of
from stars_fast.training.step.penalties.base import Method, NoPenalty, Penalty
from stars_fast.training.step.penalties.jacobian import (
    JacobianAtLast,
    JacobianAtNext,
    jacobian_estimate,
)


class Size(Penalty):
    """The mean square of the last state."""

    def compute(self, micro, states):
        return states[-1], states[-1].float().square().mean()

    def cost(self):
        return 0.5


class SizeOfTurn(Penalty):
    """||J v||^2 at one v in the last turn, which it runs itself."""

    needs_dual = True
    last_turns = 1

    def compute(self, micro, states):
        h, settings = states[-1], self.config.penalty
        turn, samples = micro.dual_turn(micro.turn), micro.batch.samples
        return jacobian_estimate(
            turn,
            h,
            torch.linspace(-1, 1, h.shape[-1]).to(h).expand_as(h),
            samples,
            settings,
        )

    def cost(self):
        return 2.0


class Added(NamedTuple):
    name: str
    penalty: type[Penalty]


@pytest.fixture(
    params=[Added("size", Size), Added("size-of-turn", SizeOfTurn)], ids=lambda p: p.name
)
def added(request, monkeypatch):
    method = Method(None, request.param.penalty, "a penalty of this test")
    monkeypatch.setitem(METHODS, request.param.name, method)
    return request.param.name


SHARED = {"detach": False}
ROUND = {"depth": {"law": "fixed", "value": 4}, "penalty": SHARED}


def rows(outcome):
    return read_metrics(outcome.folder / "metrics.jsonl")


def test_a_run_trains_with_it(tiny, added, capsys):
    config = tiny(method=added, train={"steps": 20}, optim={"lr": 0.01}, **ROUND)
    found = rows(train(config))
    assert all(row["lambda"] == 0.1 for row in found)
    assert all(row["penalty"] > 0 for row in found)
    assert found[-1]["loss"] < found[0]["loss"]
    banner, *_ = capsys.readouterr().err.splitlines()
    assert f": {added}, " in banner
    assert "lambda 0.1" in banner


def test_its_cost_is_in_that_of_a_step(tiny, added):
    config = tiny(method=added, **ROUND)
    expected = (4 + METHODS[added].penalty(config).cost()) / 4
    assert relative_cost(config, outside=0.0) == pytest.approx(expected)


@pytest.mark.parametrize("recompute", ["turn", "layer"])
def test_recomputing_does_not_change_it(tiny, added, recompute, tmp_path, capsys):
    changes = {"method": added, **ROUND, "train": {"steps": 2}}
    plain = rows(train(tiny(**changes, memory={"recompute": "none"}, out=str(tmp_path / "plain"))))
    again = rows(
        train(tiny(**changes, memory={"recompute": recompute}, out=str(tmp_path / "again")))
    )
    assert [row["loss"] for row in again] == [row["loss"] for row in plain]
    assert [row["grad_norm"] for row in again] == [row["grad_norm"] for row in plain]
    told = capsys.readouterr().err
    turns = 3 if METHODS[added].penalty.last_turns else 4
    assert f"recomputes the first {turns} turns" in told
    dual = recompute == "layer" and METHODS[added].penalty.needs_dual
    assert ("and the dual turn layer by layer" in told) == dual


def test_a_resumed_run_is_the_same(tiny, added, tmp_path, monkeypatch):
    changes = {"method": added, **ROUND, "train": {"steps": 6, "save_every": 3}}
    straight = train(tiny(**changes, out=str(tmp_path / "straight")))
    with monkeypatch.context() as patch:
        real = trainer.train_step

        def lost(*args):
            if args[4].step == 4:
                raise KeyboardInterrupt
            return real(*args)

        patch.setattr(trainer, "train_step", lost)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(**changes))
    resumed = train(tiny(**changes), resume=True)
    found, expected = (saved_tensors(latest(o.folder / "checkpoints")) for o in (resumed, straight))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_choices_come_from_the_files(tiny):
    assert list(METHODS) == ["sft", "random-loop", "one-step", "fixed-point", "jsrr", "stars", "l2"]
    with pytest.raises(ConfigError, match=r"method: expected one of sft, .*, got 'size'"):
        tiny(method="size")


@pytest.mark.parametrize(
    ("method", "penalty", "kind"),
    [
        ("sft", {}, NoPenalty),
        ("stars", {"weight": 0.0}, NoPenalty),
        ("stars", {}, JacobianAtNext),
        ("stars", {"at": "last", "detach": False}, JacobianAtLast),
    ],
    ids=["sft", "no-weight", "next", "last"],
)
def test_the_configuration_says_which(tiny, method, penalty, kind):
    assert type(penalty_of(tiny(method=method, penalty=penalty))) is kind
