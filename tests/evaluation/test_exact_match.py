import pytest
import torch
import torch.nn.functional as F

from stars_fast.data.addition import AdditionConfig, AdditionData
from stars_fast.data.kinds.sums import Sums
from stars_fast.evaluation.addition import evaluate
from stars_fast.models.families.looped_lm import LoopedLoop
from stars_fast.models.looped import LoopedConfig, LoopedLM

TURNS = [5, 1, 2, 12]


@pytest.fixture(scope="module")
def data():
    return AdditionData(AdditionConfig(digits=1, train_samples=50, test_samples=31))


@pytest.fixture(scope="module")
def model(data):
    """Trained until it is right about some of the sums at two turns."""
    torch.manual_seed(0)
    config = LoopedConfig(
        vocab_size=data.tokenizer.vocab_size,
        max_length=data.max_length,
        d_model=32,
        n_heads=2,
        d_ff=64,
        dropout=0.1,
    )
    model = LoopedLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = data.batch("train", torch.arange(50))
    for _ in range(150):
        loss = F.cross_entropy(model(batch.tokens, 2).flatten(0, 1), batch.targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


def exact_by_generation(model, data, turns):
    """The definition: generate, and compare the text."""
    right = 0
    for sequence, (a, b) in zip(data.test, data.test_pairs.tolist(), strict=True):
        end = data.tokenizer.end_id
        prompt = sequence[None, : 2 * data.config.digits + 2]
        out = model.generate(prompt, turns, data.config.digits + 2, stop=end, pad=end)
        right += data.tokenizer.decode(out[0]).rstrip("$") + "$" == f"{a}+{b}={str(a + b)[::-1]}$"
    return right / len(data.test)


def test_agrees_with_generation_at_every_number_of_turns(model, data):
    accuracy = evaluate(LoopedLoop(model), Sums(data, "test"), TURNS, batch_size=7)
    assert accuracy == {t: exact_by_generation(model, data, t) for t in TURNS}
    assert list(accuracy) == TURNS
    assert 0.05 < accuracy[2] < 1
    assert len(set(accuracy.values())) > 1


def test_limit_takes_the_first_sums(model, data):
    one_by_one = [
        evaluate(LoopedLoop(model), Sums(data, "test"), [2], limit=n)[2] * n
        for n in range(1, len(data.test) + 1)
    ]
    steps = [b - a for a, b in zip([0, *one_by_one], one_by_one, strict=False)]
    assert {round(step, 9) for step in steps} == {0, 1}
    assert evaluate(LoopedLoop(model), Sums(data, "test"), [2], limit=10_000) == evaluate(
        LoopedLoop(model), Sums(data, "test"), [2], limit=31
    )


def test_puts_the_mode_back(model, data):
    model.train()
    assert evaluate(LoopedLoop(model), Sums(data, "test"), [2]) == evaluate(
        LoopedLoop(model), Sums(data, "test"), [2]
    )
    assert model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"turns": []}, r"turns: expected integers >= 1, got \[\]"),
        ({"turns": [4, 0]}, r"turns: expected integers >= 1, got \[4, 0\]"),
        ({"turns": [1.5]}, r"turns: expected integers >= 1, got \[1.5\]"),
        ({"turns": [1], "limit": 0}, "limit: expected >= 1, got 0"),
        ({"turns": [1], "batch_size": 0}, "batch_size: expected >= 1, got 0"),
    ],
)
def test_errors(model, data, arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate(LoopedLoop(model), Sums(data, "test"), **arguments)
