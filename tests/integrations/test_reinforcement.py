"""The penalty in TRL's GRPOTrainer and RLOOTrainer: of the tokens of the completions, at the
model's own depth."""

import pytest
import torch
from oracle import KeepDouble
from ouro_models import model
from penalised import NETS, first_layer, own_turn, run_two_processes

from stars_fast.data.samples import sample_noise
from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.models.ouro.tiny import write_tiny_ouro
from stars_fast.tokens import Tokens

pytest.importorskip("trl")

from two_processes_grpo import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "ouro"
    write_tiny_ouro(folder, remote_code=False)
    return folder


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def penalty_by_hand(net, seen, seed):
    """Gradients of the mean over all rows of ||J v||^2, each alone and unpadded, v on its
    completion alone; J v is a difference of the turn."""
    net.zero_grad()
    rows = [
        (torch.cat([each["prompt_ids"][i][p], each["completion_ids"][i][c]]), int(c.sum()))
        for each in seen
        for i, (p, c) in enumerate(
            zip(each["prompt_mask"].bool(), each["completion_mask"].bool(), strict=True)
        )
    ]
    total = 0.0
    for number, (ids, new) in enumerate(rows):
        out = net(ids[None], output_hidden_states=True)
        h = out.hidden_states[-1].detach()
        real = torch.arange(len(ids))[None] >= len(ids) - new
        v = sample_noise(h, Tokens(1, len(ids), real), seed, 0, [number])
        assert not v[:, : len(ids) - new].any()
        v = v / v.norm()

        def turn(s, h=h, v=v, out=out):
            return own_turn(net, h + s * 1e-3 * v, out)

        jv = (8 * (turn(1) - turn(-1)) - (turn(2) - turn(-2))) / 12e-3
        total = total + jv[real].square().sum() / len(rows)
    total.backward()
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "way", "accumulation"),
    [
        ("ouro", "GRPO", 1),
        ("ouro", "GRPO", 2),
        ("huginn", "GRPO", 2),
        ("looped", "GRPO", 1),
        ("ouro", "RLOO", 2),
        ("huginn", "RLOO", 1),
    ],
)
def test_the_gradient_is_the_trainers_and_that_of_the_completions_by_hand(
    tokenizer, tmp_path, kind, way, accumulation
):
    torch.manual_seed(1)
    net = NETS[kind]()
    state = {name: x.clone() for name, x in net.state_dict().items()}
    with KeepDouble():
        plain, without = train(net, tokenizer, tmp_path / "a", 0.0, accumulation, kind=way)
        net.load_state_dict(state)
        trainer, found = train(net, tokenizer, tmp_path / "b", 0.3, accumulation, kind=way)
    assert len(trainer.seen) == accumulation
    for one, other in zip(plain.seen, trainer.seen, strict=True):
        assert torch.equal(one["completion_ids"], other["completion_ids"])
    net.load_state_dict(state)
    with KeepDouble():
        penalty = penalty_by_hand(net, trainer.seen, seed=5)
    row = next(row for row in trainer.state.log_history if "penalty" in row)
    assert row["depth"] == net.config.turns
    for name, got in found.items():
        expected = 0.7 * without[name] + 0.3 * penalty.get(name, torch.zeros_like(got))
        # TRL's own head computes its loss in fp32.
        assert (got - expected).norm() <= 1e-6 * expected.norm(), name
    weight = first_layer(net)
    some = next(name for name, p in net.named_parameters() if p is weight)
    assert penalty[some].norm() > 1e-3 * without[some].norm() > 0


def test_another_depth_than_the_one_it_generates_at_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="turns: expected None with Recorded"):
        train(model(vocab_size=len(tokenizer)), tokenizer, tmp_path, 0.1, turns=2)


def test_samples_that_rest_early_are_refused(tokenizer, tmp_path):
    net = NETS["huginn"]()
    net.config.convergence_tol = 0.1
    with pytest.raises(ValueError, match="model: expected convergence_tol=None with Recorded"):
        train(net, tokenizer, tmp_path, 0.1)


def test_two_processes_have_the_mean_over_the_rows_of_both(checkpoint, tmp_path):
    run_two_processes("two_processes_grpo.py", checkpoint, tmp_path)
    (first, gradients), (second, same) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)
    )
    assert not torch.equal(first[0]["completion_ids"], second[0]["completion_ids"])
    # In the order of the data: micro-batch by micro-batch, and process by process within each.
    seen = [each for micros in zip(first, second, strict=True) for each in micros]
    net = OuroForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    expected = penalty_by_hand(net, seen, seed=5)
    for name, want in expected.items():
        assert torch.equal(gradients[name], same[name])
        assert (gradients[name] - want).norm() <= 1e-6 * want.norm(), name
