"""The published way of a training step computes what ours does; the gate sees where it doesn't."""

import copy
from itertools import pairwise

import pytest
import torch

from benchmarks import agreement, published
from benchmarks.agreement import DisagreementError, check_agreement
from benchmarks.published import MicroBatch, Published
from benchmarks.workload import MODEL_SIZES, one_by_one, packed_batches, random_model
from stars_fast import fused_jsrr
from stars_fast.data import IGNORE
from stars_fast.models.families.ouro import OuroLoop
from stars_fast.tokens import Tokens
from stars_fast.training.step.precision import autocast

CPU = torch.device("cpu")
FIELDS = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture
def model():
    return random_model(FIELDS, CPU, "float32")


def micro_batch(length=9, turns=2, skipped=3):
    tokens = torch.randint(3, 40, (1, length))
    targets = torch.randint(3, 40, (1, length))
    targets[:, :skipped] = IGNORE
    return MicroBatch(tokens, targets, turns)


def gradient(model, loss):
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])


@pytest.mark.parametrize("precision", ["float32", "mixed", "bfloat16"])
def test_it_computes_what_ours_does(precision):
    values = ("token loss", "published penalty", "our penalty")
    found = check_agreement(MODEL_SIZES["tiny"].model, CPU, precision)
    assert set(found) == {*values, *(f"{value}, gradient" for value in values)}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("mixed", torch.bfloat16)],
)
def test_states_have_the_dtype_of_our_turns(precision, dtype):
    model = random_model(FIELDS, CPU, precision)
    way, seen = Published(model, precision), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with autocast(precision, CPU, sharded=False):
        batch = micro_batch()
        assert way.states(batch.tokens, 0).dtype == dtype
        h = way.states(batch.tokens, 2)
        way.token_loss(h, batch.targets)
    assert h.dtype == dtype
    assert seen
    assert set(seen) == {dtype}


def wrong_norm(norm, x):
    return norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3))


def wrong_value(penalty):
    return lambda *args, **kwargs: 1.001 * penalty(*args, **kwargs)


def detached(penalty):
    return lambda *args, **kwargs: penalty(*args, **kwargs).detach()


def half_detached(penalty):
    def half(*args, **kwargs):
        found = penalty(*args, **kwargs)
        return (found + found.detach()) / 2

    return half


@pytest.mark.parametrize(
    ("target", "name", "wrong", "message"),
    [
        (published, "rms_norm", wrong_norm, "token loss: "),
        (published, "rotated", lambda x, cos, sin: x, "token loss(, gradient)?: "),
        (Published, "penalty", wrong_value(Published.penalty), "published penalty: "),
        (agreement, "fused_jsrr", wrong_value(fused_jsrr), "our penalty: "),
    ],
    ids=["norm", "rotary", "published penalty", "our penalty"],
)
def test_the_gate_sees_what_is_wrong(monkeypatch, target, name, wrong, message):
    monkeypatch.setattr(target, name, wrong)
    with pytest.raises(DisagreementError, match=message):
        check_agreement(MODEL_SIZES["tiny"].model, CPU, "float32")


@pytest.mark.parametrize("precision", ["float32", "mixed", "bfloat16"])
@pytest.mark.parametrize("cut", [detached, half_detached])
@pytest.mark.parametrize(
    ("target", "name", "whose"),
    [(Published, "penalty", "published"), (agreement, "fused_jsrr", "our")],
    ids=["published", "ours"],
)
def test_the_gate_sees_a_penalty_without_its_gradient(
    monkeypatch, precision, cut, target, name, whose
):
    monkeypatch.setattr(target, name, cut(getattr(target, name)))
    with pytest.raises(DisagreementError, match=f"{whose} penalty, gradient: "):
        check_agreement(MODEL_SIZES["tiny"].model, CPU, precision)


def test_checkpoints_change_no_gradient(model):
    batch = micro_batch()
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        gradients.append(
            gradient(model, Published(model, "float32", checkpointed).loss(batch, 0.1))
        )
    torch.testing.assert_close(*gradients)


def test_over_all_directions_its_penalty_is_ours(model):
    model = copy.deepcopy(model).double()
    h = torch.randn(1, 3, 16, dtype=torch.float64)
    turn = OuroLoop(model).turn(h, Tokens(*h.shape[:2]))
    way, rows, columns = Published(model, "float32"), 0.0, 0.0
    for direction in torch.eye(h.numel(), dtype=torch.float64):
        v = direction.view_as(h)
        rows += way.penalty(h, v).item()
        columns += fused_jsrr(turn, h, v=v).item()
    assert rows == pytest.approx(columns, rel=1e-12)


def test_pads_change_nothing(model):
    way = Published(model, "float32")
    long, short = micro_batch(9), micro_batch(6)
    pad = torch.zeros(1, 3, dtype=torch.int64)
    tokens = torch.cat([long.tokens, torch.cat([short.tokens, pad], 1)])
    targets = torch.cat([long.targets, torch.cat([short.targets, pad + IGNORE], 1)])
    found = way.token_loss(way.states(tokens, 2), targets, "sum")
    alone = [way.token_loss(way.states(b.tokens, 2), b.targets, "sum") for b in (long, short)]
    torch.testing.assert_close(found, sum(alone))


def test_a_step_averages_over_documents_and_moves_the_weights(model):
    way = Published(model, "float32")
    batches = [micro_batch(9), micro_batch(5)]
    losses = [way.loss(batch, 0.0) for batch in batches]
    expected = gradient(model, sum(losses) / 2)
    before = model.lm_head.weight.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = published.published_step(way, optimizer, batches, 0.0, 1e9)
    torch.testing.assert_close(loss, (sum(losses) / 2).detach())
    found = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
    torch.testing.assert_close(torch.cat(found), expected)
    assert not torch.equal(model.lm_head.weight, before)


def test_documents_one_by_one_are_those_of_the_rows():
    window = packed_batches(64, 40, CPU).window(0)
    found = one_by_one(window, [1, 2, 3, 4])
    assert torch.equal(
        torch.cat([each.tokens for each in found], 1), torch.cat([b.tokens for b in window], 1)
    )
    lengths = [b - a for batch in window for a, b in pairwise(batch.samples.cu_seqlens.tolist())]
    assert [each.tokens.shape[1] for each in found] == lengths
    assert [each.turns for each in found] == [
        depth for depth, batch in enumerate(window, 1) for _ in range(batch.samples.count)
    ]
    labels = torch.cat([each.targets[each.targets != IGNORE] for each in found])
    assert torch.equal(labels, torch.cat([batch.labels for batch in window]))
