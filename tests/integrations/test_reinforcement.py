"""The penalty in TRL's GRPOTrainer: of the tokens of the completions, at the model's own depth."""

import pytest
import torch
from ouro_models import model
from penalised import Gradients, arguments

from stars_fast.data.samples import sample_noise
from stars_fast.integrations.transformers import JacobianPenalty
from stars_fast.models.ouro.tiny import write_tiny_ouro
from stars_fast.tokens import Tokens

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.slow


class Recorded(JacobianPenalty, trl.GRPOTrainer):
    """Keeps what each micro-batch of a step was trained on."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), dict(inputs)]
        return super().compute_loss(model, inputs, *args, **kwargs)


def reward(prompts, completions, completion_ids, **kwargs):
    """By the tokens, so that the completions of a prompt differ in it."""
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny") / "ouro"
    write_tiny_ouro(folder, remote_code=False)
    return AutoTokenizer.from_pretrained(folder)


def train(net, tokenizer, folder, weight, accumulation=2, **options):
    from datasets import Dataset

    settings = {"num_generations": 2, "max_completion_length": 6, "bf16": False, "beta": 0.0}
    args = arguments(folder, 2, accumulation, trl.GRPOConfig, **settings, logging_steps=1)
    data = Dataset.from_dict({"prompt": ["1 + 2", "a much longer question", "7 * 8", "9 - 1"]})
    gradients = Gradients()
    trainer = Recorded(
        net, reward, args=args, train_dataset=data, processing_class=tokenizer,
        callbacks=[gradients], penalty_weight=weight, **options,
    )  # fmt: skip
    trainer.train()
    return trainer, gradients.steps[0]


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
        h = net(ids[None], output_hidden_states=True).hidden_states[-1].detach()
        real = torch.arange(len(ids))[None] >= len(ids) - new
        v = sample_noise(h, Tokens(1, len(ids), real), seed, 0, [number])
        assert not v[:, : len(ids) - new].any()
        v = v / v.norm()
        turn = lambda s, h=h, v=v: net.model.turn(h + s * 1e-3 * v, net.model.prepare(h))  # noqa: E731
        jv = (8 * (turn(1) - turn(-1)) - (turn(2) - turn(-2))) / 12e-3
        total = total + jv[real].square().sum() / len(rows)
    total.backward()
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_gradient_is_that_of_grpo_and_of_the_completions_by_hand(
    tokenizer, tmp_path, accumulation
):
    torch.manual_seed(1)
    net = model(vocab_size=len(tokenizer))
    state = {name: x.clone() for name, x in net.state_dict().items()}
    plain, without = train(net, tokenizer, tmp_path / "a", 0.0, accumulation)
    net.load_state_dict(state)
    trainer, found = train(net, tokenizer, tmp_path / "b", 0.3, accumulation)
    assert len(trainer.seen) == accumulation
    for one, other in zip(plain.seen, trainer.seen, strict=True):
        assert torch.equal(one["completion_ids"], other["completion_ids"])
    net.load_state_dict(state)
    penalty = penalty_by_hand(net, trainer.seen, seed=5)
    row = next(row for row in trainer.state.log_history if "penalty" in row)
    assert row["depth"] == net.config.total_ut_steps
    for name, got in found.items():
        expected = 0.7 * without[name] + 0.3 * penalty.get(name, torch.zeros_like(got))
        # TRL's own head computes its loss in fp32.
        assert (got - expected).norm() <= 1e-6 * expected.norm(), name
    some = "model.layers.0.mlp.up_proj.weight"
    assert penalty[some].norm() > 1e-3 * without[some].norm() > 0


def test_another_depth_than_the_one_it_generates_at_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="turns: expected None with Recorded"):
        train(model(vocab_size=len(tokenizer)), tokenizer, tmp_path, 0.1, turns=2)
