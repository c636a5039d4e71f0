import pytest
import torch
import torch.nn.functional as F

from stars_fast.models.looped import LoopedConfig, LoopedLM
from stars_fast.models.looped_config import NORMS, PLACEMENTS

V, MAX = 13, 12


def model(seed=0, **fields):
    torch.manual_seed(seed)
    sizes = {"vocab_size": V, "max_length": MAX, "d_model": 16, "n_heads": 4, "d_ff": 24}
    lm = LoopedLM(LoopedConfig(**(sizes | fields))).double()
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return lm


def prompts(*shape, seed=1):
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_forward_is_the_chain_of_its_parts(placement, norm):
    lm = model(placement=placement, norm=norm, n_prelude=1, n_coda=1, n_layers=2)
    tokens = prompts(2, 9)
    h = lm.prelude(tokens)
    for _ in range(3):
        h = lm.block(h)
    torch.testing.assert_close(lm(tokens, 3), lm.head(lm.coda(h)), rtol=0, atol=0)
    assert lm(tokens, 3).shape == (2, 9, V)


def test_states_are_every_turn():
    lm = model(n_coda=1)
    tokens = prompts(2, 5)
    states = lm.states(tokens, 4)
    assert len(states) == 5
    torch.testing.assert_close(states[0], lm.prelude(tokens), rtol=0, atol=0)
    for turns in (1, 2, 4):
        logits = lm.head(lm.coda(states[turns]))
        torch.testing.assert_close(logits, lm(tokens, turns), rtol=0, atol=0)


def test_turns_share_one_block_and_every_weight_gets_a_gradient():
    lm = model(n_prelude=1, n_coda=2, n_layers=2)
    blocks = sum(type(m).__name__ == "GPTBlock" for m in lm.modules())
    assert blocks == 5
    lm(prompts(2, MAX), 3).logsumexp(-1).sum().backward()
    assert [n for n, p in lm.named_parameters() if p.grad is None or p.grad.norm() == 0] == []


def test_head_is_tied_to_the_embedding():
    lm = model()
    assert not any(name.startswith("head") for name, _ in lm.named_parameters())
    h = torch.randn(1, 3, 16, dtype=torch.float64)
    torch.testing.assert_close(lm.head(h), lm.norm(h) @ lm.tokens.weight.T)


def test_positions_are_learned():
    lm = model()
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    h = lm.prelude(tokens)
    torch.testing.assert_close(h[0], lm.tokens.weight[[0, 0]] + lm.positions.weight[:2])


def test_initial_scale():
    torch.manual_seed(0)
    lm = LoopedLM(LoopedConfig(vocab_size=500, max_length=100, d_model=192, d_ff=768))
    for name, module in lm.named_modules():
        if isinstance(module, torch.nn.Embedding):
            expected = 0.02
        elif isinstance(module, torch.nn.Linear):
            expected = 0.02 if module.in_features == 768 else 0.04
            assert not module.bias.any(), name
        else:
            continue
        # 100 x 192 draws and more: the standard error of a std is at most 0.5 %.
        assert module.weight.std().item() == pytest.approx(expected, rel=0.025), name


def greedy(lm, prompt, turns, count):
    row = list(prompt)
    for _ in range(count):
        row.append(int(lm(torch.tensor([row]), turns)[0, -1].argmax()))
    return row


@pytest.mark.parametrize("turns", [1, 5])
def test_generate_is_greedy_for_every_row_on_its_own(turns):
    lm = model()
    lengths = torch.tensor([3, 6, 1])
    tokens = prompts(3, 6)
    out = lm.generate(tokens, turns, 4, lengths=lengths, pad=V - 1)
    assert out.shape == (3, 10)
    for row, prompt, length in zip(out.tolist(), tokens.tolist(), lengths.tolist(), strict=True):
        expected = greedy(lm, prompt[:length], turns, 4)
        assert row == expected + [V - 1] * (6 - length)


def test_generate_ends_each_row_at_stop():
    lm = model()
    tokens = prompts(4, 3)
    free = lm.generate(tokens, 2, 9)
    stop = int(free[0, 5])
    out = lm.generate(tokens, 2, 9, stop=stop, pad=V - 1)
    for row, unstopped in zip(out.tolist(), free.tolist(), strict=True):
        new = unstopped[3:]
        kept = new[: new.index(stop) + 1] if stop in new else new
        expected = unstopped[:3] + kept
        assert row == expected + [V - 1] * (len(row) - len(expected))


def test_generate_returns_as_soon_as_every_row_has_stopped():
    lm = model()
    tokens = prompts(1, 3)
    stop = int(lm.generate(tokens, 2, 1)[0, -1])
    assert lm.generate(tokens, 2, 9, stop=stop).shape == (1, 4)


def test_generate_turns_dropout_off_and_puts_the_mode_back():
    lm = model(dropout=0.5).train()
    tokens = prompts(4, 3)
    torch.testing.assert_close(lm.generate(tokens, 2, 9), lm.generate(tokens, 2, 9))
    assert lm.training
    assert not lm.eval().generate(tokens, 2, 9).requires_grad
    assert not lm.training


def test_learns_a_copy_task():
    torch.manual_seed(0)
    lm = LoopedLM(LoopedConfig(vocab_size=5, max_length=7, d_model=32, n_heads=2, d_ff=64))
    optimiser = torch.optim.AdamW(lm.parameters(), lr=5e-3)
    for _ in range(150):
        half = torch.randint(0, 5, (64, 4))
        tokens = torch.cat([half, half], 1)
        loss = F.cross_entropy(lm(tokens[:, :-1], 2)[:, 3:].transpose(1, 2), half)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    prompt = torch.randint(0, 5, (32, 4))
    assert (lm.generate(prompt, 2, 4)[:, 4:] == prompt).float().mean() > 0.9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 0}, "d_model: expected an integer >= 1, got 0"),
        ({"n_layers": 1.0}, "n_layers: expected an integer >= 1, got 1.0"),
        ({"n_prelude": -1}, "n_prelude: expected an integer >= 0, got -1"),
        ({"n_heads": 3}, "n_heads must divide d_model, got n_heads=3, d_model=16"),
        ({"placement": "middle"}, "placement: expected one of .* got 'middle'"),
        ({"norm": "batch"}, "norm: expected one of .* got 'batch'"),
        ({"activation": "swish"}, "activation: expected one of .* got 'swish'"),
        ({"dropout": 1.0}, r"dropout: expected a value in \[0, 1\), got 1.0"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        model(**fields)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm(prompts(2, 3), 0), "turns: expected an integer >= 1, got 0"),
        (lambda lm: lm(prompts(2, 3), 2.0), "turns: expected an integer >= 1, got 2.0"),
        (lambda lm: lm.states(prompts(2, 3), 0), "turns: expected an integer >= 1, got 0"),
        (lambda lm: lm(prompts(2, 13), 1), "at most max_length=12 long, got 13"),
        (lambda lm: lm(prompts(2, 3).int(), 1), r"\[B, S\] int64, got \[2, 3\] torch.int32"),
        (lambda lm: lm(prompts(3), 1), r"\[B, S\] int64, got \[3\] torch.int64"),
        (lambda lm: lm.generate(prompts(2, 3), 0, 1), "turns: expected an integer >= 1, got 0"),
        (lambda lm: lm.generate(prompts(2, 3), 1, 0), "max_new_tokens: expected an integer >= 1"),
        (lambda lm: lm.generate(prompts(2, 3), 1, 11), "max_new_tokens: expected at most 10 after"),
        (
            lambda lm: lm.generate(prompts(2, 3), 1, 1, lengths=torch.tensor([3])),
            r"lengths: expected \[2\] int64, got \[1\]",
        ),
        (
            lambda lm: lm.generate(prompts(2, 3), 1, 1, lengths=torch.tensor([0, 4])),
            r"lengths: expected a value in 1..3, got \[0, 4\]",
        ),
    ],
)
def test_call_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(model())
