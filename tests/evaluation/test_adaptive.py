import pytest
import torch
import torch.nn.functional as F

from stars_fast.data.addition import AdditionConfig, AdditionData
from stars_fast.data.kinds.sums import Sums
from stars_fast.evaluation.adaptive import evaluate_adaptive
from stars_fast.evaluation.addition import evaluate
from stars_fast.models.families.looped_lm import LoopedLoop
from stars_fast.models.looped import LoopedConfig, LoopedLM

LIMIT = 40


@pytest.fixture(scope="module")
def data():
    return AdditionData(AdditionConfig(digits=1, train_samples=50, test_samples=23))


@pytest.fixture(scope="module")
def model(data):
    """Trained at six turns until it is right about some of the sums."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "n_heads": 2, "d_ff": 64, "max_length": data.max_length}
    model = LoopedLM(LoopedConfig(data.tokenizer.vocab_size, dropout=0.1, **sizes))
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = data.batch("train", torch.arange(50))
    for _ in range(120):
        loss = F.cross_entropy(model(batch.tokens, 6).flatten(0, 1), batch.targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


def exact_by_generation(model, data, tol):
    right = 0
    for sequence, (a, b) in zip(data.test, data.test_pairs.tolist(), strict=True):
        end = data.tokenizer.end_id
        prompt = sequence[None, : 2 * data.config.digits + 2]
        out = model.generate(
            prompt, LIMIT, data.config.digits + 2, stop=end, pad=end, tol=tol, tol_per="token"
        )
        right += data.tokenizer.decode(out[0]).rstrip("$") + "$" == f"{a}+{b}={str(a + b)[::-1]}$"
    return right / len(data.test)


def test_per_token_agrees_with_generation(model, data):
    tols = [0.5, 0.2, 0.05]
    found = evaluate_adaptive(
        LoopedLoop(model), Sums(data, "test"), tols, LIMIT, "token", batch_size=7
    )
    assert list(found) == tols
    assert [found[t].accuracy for t in tols] == [exact_by_generation(model, data, t) for t in tols]
    assert 1 < found[0.5].turns < found[0.2].turns < found[0.05].turns <= LIMIT
    assert len({point.accuracy for point in found.values()}) > 1
    assert model.training


def test_a_sequence_waits_for_its_last_token(model, data):
    for tol in (0.5, 0.1):
        token, sequence = (
            evaluate_adaptive(LoopedLoop(model), Sums(data, "test"), [tol], LIMIT, per)[tol]
            for per in ("token", "sequence")
        )
        assert token.turns < sequence.turns
        assert token.at_limit <= sequence.at_limit


def test_a_tolerance_of_zero_is_the_fixed_depth(model, data):
    point = evaluate_adaptive(LoopedLoop(model), Sums(data, "test"), [0.0], 6)[0.0]
    assert point == (evaluate(LoopedLoop(model), Sums(data, "test"), [6])[6], 6.0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tols": []}, "tols: expected"),
        ({"tols": [-1.0]}, "tol: expected a number"),
        ({"per": "batch"}, "tol_per: expected one of"),
        ({"limit_turns": 0}, "turns: expected an integer >= 1"),
        ({"limit": 0}, "limit: expected >= 1"),
    ],
)
def test_arguments_out_of_range(model, data, change, message):
    with pytest.raises(ValueError, match=message):
        evaluate_adaptive(LoopedLoop(model), Sums(data, "test"), **({"tols": [0.1]} | change))
    assert model.training
