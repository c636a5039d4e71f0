"""The step on looped decoders, in double precision: packed and padded chats, what the penalty's
gradient reaches, and samples drawn for it."""

import pytest
import torch
from oracle import KeepDouble, relative_error
from test_ouro_step import TURNS, both_batches, share

pytest.importorskip("transformers")

from ouro_runs import ouro_run
from test_looped_decoder import looped

from stars_fast.models.families.looped_decoder import FAMILY
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.penalties.jacobian import jacobian_value
from stars_fast.training.step.train_step import StepLoss

LOOPS = {
    "none": {},
    "adapter": {"injection": "adapter"},
    "add, noise": {"injection": "add", "state": "noise", "state_std": 1.0},
}


@pytest.fixture(autouse=True)
def _keep_double():
    with KeepDouble():
        yield


@pytest.fixture
def step_of(tmp_path):
    """step_of(decoder, loop, **changes): a StepLoss."""

    def make(name, loop, **changes):
        model = looped(name, **LOOPS[loop])
        config = ouro_run(tmp_path / "run", tmp_path, method="jsrr", **changes)
        return StepLoss(FAMILY.loop(model), config)

    return make


@pytest.mark.parametrize("at", ["next", "last"])
@pytest.mark.parametrize(
    ("name", "loop"), [("gemma3", "adapter"), ("gpt2", "add, noise"), ("llama", "none")]
)
def test_loss_penalty_and_gradient_of_packed_and_padded_agree(step_of, name, loop, at):
    step_loss = step_of(name, loop, penalty={"at": at, "detach": at == "next"})
    one, two = (share(step_loss, batch, 0.1) for batch in both_batches())
    torch.testing.assert_close(one[0], two[0], rtol=1e-10, atol=0)
    torch.testing.assert_close(one[1], two[1], rtol=1e-6, atol=0)
    assert relative_error(one[2], two[2]) < 1e-9


@pytest.mark.parametrize("at", ["next", "last"])
def test_a_part_of_the_samples_has_its_own_inputs(step_of, at):
    """The mean over all draws of one sample is the penalty of all, and the output is whole."""
    settings = {"at": at, "detach": at == "next"}
    step_loss = step_of("qwen3", "adapter", penalty=settings)
    part_loss = step_of("qwen3", "adapter", penalty={**settings, "fraction": 0.25})
    for batch in both_batches():
        micro = MicroStep(step_loss.loop, batch, step_loss.config, 0)
        states = micro.turns(TURNS)
        out, whole = step_loss.penalty.compute(micro, states)
        found = []
        for i in range(4):
            part = batch.samples.subset([i])
            if at == "next":
                found.append(jacobian_value(*part_loss.penalty.asked(micro, states, part)))
            else:
                part_loss.penalty.drawn = lambda *_, part=part: part
                mine, value = part_loss.penalty.compute(micro, states)
                torch.testing.assert_close(mine, out, rtol=1e-11, atol=1e-11)
                found.append(value)
        torch.testing.assert_close(torch.stack(found).mean(), whole, rtol=1e-10, atol=0)
