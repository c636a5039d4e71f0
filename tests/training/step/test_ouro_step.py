"""The step on Ouro: packed and padded chats, the penalty at either state and on some samples, in
double precision against the formulas written out.

Tolerances: what differs in double precision is the order of sums over some hundred terms, through
turns and backward: 1e-11 of a state, 1e-10 of a loss, 1e-9 where torch.func.jvp or a gradient comes
in. The parts that a step reports, token loss and penalty, are added up in fp32: 1e-6.
"""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from ouro_runs import ouro_run

from stars_fast.data import IGNORE
from stars_fast.data.batches import Batches
from stars_fast.data.documents import PackedChats, PaddedChats, next_tokens
from stars_fast.models.families.ouro import FAMILY, OuroLoop
from stars_fast.training.step.micro_step import begin
from stars_fast.training.step.penalties import jacobian
from stars_fast.training.step.train_step import StepLoss, StepPlan

LENGTHS = [7, 12, 3, 9]
TURNS = 3


class Chats:
    """Four documents of random tokens; about half of the tokens are targets."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.lengths = np.array(LENGTHS)
        self._documents = [
            (rng.integers(3, 300, n).astype(np.int32), rng.random(n) < 0.5) for n in LENGTHS
        ]
        for _, targets in self._documents:
            targets[0], targets[1] = False, True

    def __len__(self):
        return len(self.lengths)

    def document(self, index):
        return self._documents[index]


def batch_of(packed, chats=None):
    chats = chats or Chats()
    source = PackedChats(chats, 64, 0) if packed else PaddedChats(chats, 0)
    (batch,) = Batches(source, 0, len(source)).window(0)
    return batch


def order_of(batch, chats):
    """Which document each sample of the batch is."""
    parts = batch.samples.per_sample(batch.tokens)
    known = [chats.document(i)[0].tolist() for i in range(len(LENGTHS))]
    return [known.index(part.tolist()) for part in parts]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(dtype, **changes): a StepLoss of a tiny Ouro."""
    folder = tmp_path_factory.mktemp("model")
    config = ouro_run(folder / "run", folder)
    model, _ = FAMILY.start(config.model, torch.float32, config.seed)

    def make(dtype=torch.float64, **changes):
        config = ouro_run(folder / "run", folder, **changes)
        return StepLoss(OuroLoop(model.to(dtype).train()), config)

    return make


def share(step_loss, batch, weight=0.0, step=0):
    """Loss and its parts of a micro-batch that is the whole window, and the gradient."""
    plan = StepPlan(step, [TURNS], weight, 0.0)
    loss, parts = step_loss(batch, plan, TURNS, len(batch.labels))
    parameters = [p for p in step_loss.parameters() if p.requires_grad]
    return loss, parts, torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def both_batches():
    """The documents packed, and padded in the same order."""
    packed, chats = batch_of(True), Chats()
    order = order_of(packed, chats)
    chats.lengths = chats.lengths[order]
    chats._documents = [chats._documents[i] for i in order]
    padded = batch_of(False)
    tokens, targets, samples = PaddedChats(chats, 0).batch(np.arange(4))
    positions = (targets.flatten() != IGNORE).nonzero().squeeze(1)
    return packed, padded.__class__(
        tokens, positions, targets.flatten()[positions], samples, 0, 4, 1, 0, padded.real_tokens
    )


def states(step_loss, batch, turns=TURNS):
    h = begin(step_loss.loop, batch, step_loss.config.precision).state
    turn = step_loss.loop.turn(h, batch.samples)
    for _ in range(turns):
        h = turn(h)
    return h, turn


def test_targets_are_the_next_tokens_and_never_cross_a_document():
    chats = Chats()
    for document in range(4):
        _, following = next_tokens(chats, document)
        ids, targets = chats.document(document)
        assert following[-1] == IGNORE
        for i in range(len(ids) - 1):
            assert following[i] == (ids[i + 1] if targets[i + 1] else IGNORE)
    count = sum(int(chats.document(i)[1].sum()) for i in range(4))
    assert len(batch_of(True).labels) == len(batch_of(False).labels) == count


def test_packed_and_padded_agree_per_token_and_per_document(trained):
    chats, step_loss = Chats(), trained()
    found = {}
    for packed in (True, False):
        batch = batch_of(packed)
        h, _ = states(step_loss, batch)
        parts = batch.samples.per_sample(h)
        found[packed] = dict(zip(order_of(batch, chats), parts, strict=True))
    for document in range(4):
        torch.testing.assert_close(
            found[True][document], found[False][document], rtol=1e-11, atol=1e-11
        )
        alone = Chats()
        alone.lengths, alone._documents = alone.lengths[[document]], [chats.document(document)]
        h, _ = states(step_loss, batch_of(False, alone))
        torch.testing.assert_close(h[0], found[True][document], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("changes", [{}, {"penalty": {"at": "last", "detach": False}}])
def test_loss_penalty_and_gradient_of_packed_and_padded_agree(trained, changes):
    """The noise of a document follows its place in the batch: the padded batch is put in the order
    of the packed one."""
    step_loss = trained(method="jsrr", **changes)
    packed, padded = both_batches()
    one, two = share(step_loss, packed, 0.1), share(step_loss, padded, 0.1)
    torch.testing.assert_close(one[0], two[0], rtol=1e-10, atol=0)
    torch.testing.assert_close(one[1], two[1], rtol=1e-6, atol=0)
    assert relative_error(one[2], two[2]) < 1e-9


def test_one_document_does_not_change_the_others_by_a_bit(trained):
    step_loss = trained(torch.float32)
    batch = batch_of(True)
    h, _ = states(step_loss, batch)
    other = batch_of(True)
    changed = 2
    part = other.samples.per_sample(other.tokens)[changed]
    part.copy_((part + 5) % 300)
    g, _ = states(step_loss, other)
    for i, (mine, theirs) in enumerate(
        zip(batch.samples.per_sample(h), batch.samples.per_sample(g), strict=True)
    ):
        assert torch.equal(mine, theirs) == (i != changed)

    def losses(h):
        weight = step_loss.loop.model.lm_head.weight
        logits = h.flatten(0, 1)[batch.positions] @ weight.T
        return F.cross_entropy(logits, batch.labels, reduction="none")

    start, stop = batch.samples.sample_bounds[changed]
    outside = (batch.positions < start) | (batch.positions >= stop)
    assert torch.equal(losses(h)[outside], losses(g)[outside])
    assert not torch.equal(losses(h), losses(g))


def written_out(step_loss, batch, at, detach, weight):
    """(1 - weight) L + weight R, with the Jacobian-vector product by torch.func."""
    from stars_fast.data.samples import sample_noise

    before, turn = states(step_loss, batch, TURNS - 2)
    h = turn(before)
    out = turn(h)
    logits = out.flatten(0, 1)[batch.positions] @ step_loss.loop.model.lm_head.weight.T
    loss = F.cross_entropy(logits, batch.labels)
    place = out if at == "next" else h
    place = place.detach() if detach else place
    v = sample_noise(place, batch.samples, step_loss.config.seed, 0, range(4))
    if step_loss.config.penalty.direction == "step":
        v = (out - h if at == "next" else h - before).detach()
    penalty = 0.0
    for i, part in enumerate(batch.samples.per_sample(v)):
        alone = torch.zeros_like(v)
        batch.samples.per_sample(alone)[i].copy_(part / part.norm())
        _, jv = torch.func.jvp(turn, (place,), (alone,))
        penalty = penalty + batch.samples.per_sample(jv)[i].square().sum() / 4
    return loss, penalty, (1 - weight) * loss + weight * penalty


@pytest.mark.parametrize(
    ("at", "detach"), [("next", True), ("next", False), ("last", False)], ids=str
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("direction", ["random", "step"])
def test_the_loss_and_its_gradient_are_the_formula(trained, at, detach, packed, direction):
    penalty = {"at": at, "detach": detach, "direction": direction}
    step_loss = trained(method="jsrr", penalty=penalty)
    step_loss.loop.model.config._attn_implementation = "eager"  # torch.func takes no fused one
    batch = batch_of(packed)
    got, parts, gradient = share(step_loss, batch, 0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stars_fast.functional.ops", PlainOps)
        loss, penalty, want = written_out(step_loss, batch, at, detach, 0.3)
        parameters = [p for p in step_loss.parameters() if p.requires_grad]
        expected = torch.autograd.grad(want, parameters)
    step_loss.loop.model.config._attn_implementation = "sdpa"
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
    expected_parts = torch.stack([loss, penalty]).detach()
    torch.testing.assert_close(parts, expected_parts, check_dtype=False, rtol=1e-6, atol=0)
    assert relative_error(gradient, torch.cat([g.flatten() for g in expected])) < 1e-8


class PlainOps:
    """The ops of a layer in plain PyTorch, which torch.func can go through."""

    @staticmethod
    def rms_norm(x, weight, eps, dtype=None, dual=False):
        assert dtype in (None, x.dtype)
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    @classmethod
    def sandwich(cls, branch, residual, out, into, out_eps, into_eps, dual=False):
        h = residual + cls.rms_norm(branch, out, out_eps)
        return h, cls.rms_norm(h, into, into_eps)

    @staticmethod
    def rotary(x, cos, sin):
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    @staticmethod
    def gated(gate, up, activation, dual=False):
        assert activation == "silu"
        return F.silu(gate) * up


@pytest.mark.parametrize("at", ["next", "last"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_some_samples_stand_for_all(trained, at, packed, monkeypatch):
    """Over all choices of two of the four samples the mean is that of all; the token loss is the
    same with each."""
    changes = {"at": at, "detach": at == "next"}
    batch = batch_of(packed)
    loss, parts, gradient = share(trained(method="jsrr", penalty=changes), batch, 0.3)
    half = trained(method="jsrr", penalty={**changes, "fraction": 0.5})
    found = []
    for chosen in combinations(range(4), 2):
        monkeypatch.setattr(jacobian, "draw_samples", lambda *_, chosen=chosen: list(chosen))
        found.append(share(half, batch, 0.3))
        torch.testing.assert_close(found[-1][1][0], parts[0])
    assert len({float(each[0].detach()) for each in found}) == 6
    mean = [torch.stack([each[i] for each in found]).mean(0) for i in (0, 2)]
    torch.testing.assert_close(mean[0], loss, rtol=1e-10, atol=0)
    assert relative_error(mean[1], gradient) < 1e-9


@pytest.mark.parametrize("at", ["next", "last"])
def test_without_a_step_to_take_the_direction_is_random(trained, at):
    """After one turn `last` is at the first state."""
    batch = batch_of(True)
    found = {}
    for direction in ("random", "step"):
        penalty = {"at": at, "detach": at == "next", "direction": direction}
        step_loss = trained(method="jsrr", penalty=penalty)
        plan = StepPlan(0, [1], 0.3, 0.0)
        found[direction], _ = step_loss(batch, plan, 1, len(batch.labels))
    assert (found["random"] == found["step"]) == (at == "last")


@pytest.mark.parametrize("at", ["next", "last"])
def test_some_micro_batches_stand_for_all(trained, at):
    """Over many steps each of four micro-batches is drawn alike; the drawn one counts four times,
    and the others' loss is the token loss alone."""
    penalty = {"at": at, "detach": at == "next"}
    train = {"accumulation": 4, "batch_size": 4}
    whole = trained(method="jsrr", penalty=penalty, train=train)
    some = {"draw": "micro-batches", "fraction": 0.25}
    quarter = trained(method="jsrr", penalty={**penalty, **some}, train=train)
    for rank in (0, 1):  # of two: the micro-batches of a window are the same on both
        batch = replace(batch_of(True), step_micro_batches=8, index=2 * 2 + rank)
        factors = [quarter.penalty.factor(batch, step) for step in range(400)]
        assert set(factors) == {0.0, 4.0}
        assert 70 < factors.count(4.0) < 130  # 100 are expected, with a deviation of 9
        drawn, left = factors.index(4.0), factors.index(0.0)
        loss, parts, _ = share(quarter, batch, 0.3, drawn)
        _, all_parts, _ = share(whole, batch, 0.3, drawn)
        torch.testing.assert_close(parts[1], 4 * all_parts[1])
        loss, parts, gradient = share(quarter, batch, 0.3, left)
        assert parts[1] == 0
        plain, _, token_gradient = share(trained(), batch)
        torch.testing.assert_close(loss, 0.7 * plain, rtol=1e-10, atol=0)
        assert relative_error(gradient, 0.7 * token_gradient) < 1e-9
    places = [replace(batch_of(True), step_micro_batches=8, index=2 * place) for place in range(4)]
    for step in range(20):  # one of a window
        factors = [quarter.penalty.factor(b, step) for b in places]
        assert sorted(factors) == [0.0, 0.0, 0.0, 4.0]


def test_as_many_samples_are_drawn_in_each_micro_batch(trained):
    """Whatever number of documents it holds, unless it holds fewer."""
    penalty = trained(method="jsrr", penalty={"fraction": 0.25}).penalty
    drawn = []
    for count in (1, 2, 3, 4):
        whole = batch_of(True)
        part = whole.samples.subset(range(count))
        batch = replace(whole, samples=part.tokens, step_samples=24, step_micro_batches=3)
        drawn.append(penalty.drawn(batch, 0))
    assert drawn[:2] == [None, None]  # all that there are
    assert [part.tokens.count for part in drawn[2:]] == [2, 2]


def test_a_window_without_targets_has_a_loss_of_zero(trained):
    step_loss = trained()
    batch = batch_of(True)
    none = batch.__class__(
        batch.tokens, batch.positions[:0], batch.labels[:0], batch.samples, 0, 4, 1, 0, 31
    )
    plan = StepPlan(0, [TURNS], 0.0, 0.0)
    loss, _ = step_loss(none, plan, TURNS, 1)
    loss.backward()
    assert float(loss) == 0.0
    assert all(not p.grad.any() for p in step_loss.parameters() if p.grad is not None)
