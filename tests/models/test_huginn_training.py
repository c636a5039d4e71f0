"""Huginn in training: the dual turn and its gradients, where the gradient stops, and steps of a run
that make the loss fall."""

import huginn_reference
import pytest
import torch
from huginn_models import checkpoint, files, model, tokens
from oracle import HALVES, cotangents, relative_error
from tolerances import BLOCK
from torch.func import jvp

from stars_fast import explain, fused_jsrr, fused_jvp, looped_block
from stars_fast.data.batches import micro_batch
from stars_fast.data.documents import PackedChats, PaddedChats, TokenDocuments
from stars_fast.data.samples import draw_samples, sample_noise
from stars_fast.models.families import families
from stars_fast.models.huginn.tiny import SHAPES
from stars_fast.training.config import config_from
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.trainer import train
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.train_step import StepLoss, StepPlan

each_shape = pytest.mark.parametrize("shape", SHAPES)


def state(seed, batch=2, length=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 32, generator=generator, dtype=torch.float64)


class Reference:
    """A turn by the formulas, on weights of its own."""

    def __init__(self, shape):
        weights, self.config = files(checkpoint(shape))
        self.shape = shape
        self.weights = {
            key: weight.double().requires_grad_()
            for key, weight in weights.items()
            if "core_block" in key or "adapter" in key
        }

    def __call__(self, h, inputs):
        rows = zip(h, inputs, strict=True)
        turn = huginn_reference.turn
        return torch.stack([turn(self.weights, self.config, self.shape, s, e) for s, e in rows])


@pytest.mark.parametrize("half", HALVES)
@each_shape
def test_the_dual_turn_and_every_gradient_are_those_of_torch_func_jvp(shape, half):
    net, reference = model(shape), Reference(shape)
    h, v = state(1).requires_grad_(), state(2).requires_grad_()
    inputs = state(3).requires_grad_()
    block = looped_block(net, inputs=inputs)
    bars = dict(zip(HALVES, cotangents((2, *h.shape)), strict=True))[half].unbind()

    out, tangent = fused_jvp(block, h, v)
    leaves = dict(block.named_parameters())
    found = torch.autograd.grad((out, tangent), [h, v, inputs, *leaves.values()], bars)

    expected = jvp(lambda x: reference(x, inputs), (h,), (v,))
    for mine, theirs in zip((out, tangent), expected, strict=True):
        assert relative_error(mine, theirs) <= BLOCK
    mine = [h, v, inputs, *(reference.weights[f"transformer.{key}"] for key in leaves)]
    wanted = torch.autograd.grad(expected, mine, bars)
    assert len(leaves) == len(reference.weights)
    for name, a, b in zip(("h", "v", "inputs", *leaves), found, wanted, strict=True):
        assert relative_error(a, b) <= BLOCK, name


@each_shape
def test_the_penalty_is_that_of_the_formulas(shape):
    net, reference = model(shape), Reference(shape)
    h, v, inputs = state(1), state(2), state(3).requires_grad_()
    block = looped_block(net, inputs=inputs)
    penalty = fused_jsrr(block, h, v=v)
    _, jv = jvp(lambda x: reference(x, inputs), (h,), (v,))
    expected = (jv.square().sum((1, 2)) / v.square().sum((1, 2))).mean()
    assert relative_error(penalty, expected) <= BLOCK
    leaves = [inputs, *block.parameters()]
    names = [key for key, _ in block.named_parameters()]
    theirs = [inputs, *(reference.weights[f"transformer.{key}"] for key in names)]
    found = torch.autograd.grad(penalty, leaves)
    for a, b in zip(found, torch.autograd.grad(expected, theirs), strict=True):
        assert relative_error(a, b) <= BLOCK


@each_shape
def test_no_op_of_a_turn_falls_back(shape):
    report = explain(looped_block(model(shape), inputs=state(3)), state(1))
    assert report.fallbacks == []
    fused = {op for op, path in report.ops if path == "fused"}
    assert {"rms_norm", "rotary", "attention", "gated"} <= fused


def test_the_block_is_the_turn_of_the_model():
    net, ids = model(), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        out = net(ids, attention_mask=mask, turns=3, output_hidden_states=True)
        block = looped_block(net, inputs=out.inputs, attention_mask=mask)
        for before, after in zip(out.hidden_states[:-1], out.hidden_states[1:], strict=True):
            assert torch.equal(block(before)[mask.bool()], after[mask.bool()])
    names = {name for name, _ in block.named_parameters()}
    assert names == {
        key.removeprefix("transformer.")
        for key, _ in net.named_parameters()
        if "core_block" in key or "adapter" in key
    }
    with pytest.raises(ValueError, match=r"inputs: expected Huginn's injected input .*got None"):
        looped_block(net)(out.inputs)
    with pytest.raises(ValueError, match="layers: expected None for Huginn's own turn"):
        looped_block(net, layers=slice(1))


def test_an_adapter_of_adapters_keeps_the_tangent():
    """A map that is more than its weight is called, with the pair."""

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = torch.nn.Linear(base.in_features, 2, bias=False, dtype=torch.float64)
            self.up = torch.nn.Linear(2, base.out_features, bias=False, dtype=torch.float64)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    for shape in ("huginn", "olmo2"):
        net, h, v, inputs = model(shape), state(1), state(2), state(3)
        net.transformer["adapter"] = Adapted(net.part("adapter"))
        attention = net.part("core_block")[0].attn
        attention.Wqkv = Adapted(attention.Wqkv)
        block, eps = looped_block(net, inputs=inputs), 1e-6
        with torch.no_grad():
            difference = (block(h + eps * v) - block(h - eps * v)) / (2 * eps)
        assert relative_error(fused_jvp(block, h, v)[1], difference) <= 1e-7
        assert explain(block, h).fallbacks == []


# -- the loss, and where its gradient stops


def plain_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@each_shape
def test_the_loss_is_the_cross_entropy_of_the_next_token(shape):
    net, ids = model(shape), tokens(2, 7)
    labels = ids.clone()
    labels[0, 4:] = -100
    out = net(ids, labels=labels, turns=2)
    torch.testing.assert_close(out.loss, plain_loss(out.logits, labels))
    assert net.train()(ids, labels=labels, turns=2).logits is None


@pytest.mark.parametrize("kept", [1, 2, 5])
@pytest.mark.parametrize("shape", ["huginn", "llama"])
def test_a_truncated_gradient_is_that_by_hand(shape, kept):
    """Of 5 turns the last `kept` carry a gradient: the state before them is a constant, and the
    prelude hears of those turns alone."""
    net, ids = model(shape), tokens(2, 7)
    parameters = list(net.parameters())
    loss = net(ids, labels=ids, turns=5, backprop_turns=kept).loss
    found = torch.autograd.grad(loss, parameters)

    context = net.prepare(net.embed(ids))
    e = net.prelude(net.embed(ids), context)
    h = net.first_state(e, context)
    for _ in range(5 - kept):
        h = net.turn(h, e, context).detach()
    for _ in range(kept):
        h = net.turn(h, e, context)
    by_hand = plain_loss(net.read(h, context), ids)
    torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=0)
    for a, b in zip(found, torch.autograd.grad(by_hand, parameters), strict=True):
        assert relative_error(a, b) <= BLOCK
    whole = torch.autograd.grad(net(ids, labels=ids, turns=5).loss, parameters)
    apart = max(relative_error(a, b) for a, b in zip(found, whole, strict=True))
    assert (apart <= BLOCK) == (kept == 5)
    pair = net(ids, labels=ids, num_steps=(5 - kept, kept)).loss
    for a, b in zip(torch.autograd.grad(pair, parameters), found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_recomputed_layers_have_the_same_gradient():
    ids = tokens(2, 7)
    found = []
    for recompute in (False, True):
        torch.manual_seed(5)
        net = model().train()
        if recompute:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        net(ids, labels=ids, turns=3).loss.backward()
        found.append([p.grad for p in net.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="use_cache: expected no cache with gradient checkpoint"):
        net(ids, use_cache=True)


# -- the step and the run

RUN = {
    "precision": "float32",
    "model": {"family": "huginn", "path": "tiny", "width": 32},
    "data": {"kind": "text", "length": 32},
    "depth": {"law": "poisson-lognormal", "rate": 4.0, "sigma": 0.5, "low": 1, "high": 8},
    "penalty": {"fraction": 0.5},
    "optim": {"lr": 3e-3, "weight_decay": 0.0},
    "train": {
        "steps": 30, "batch_size": 4, "log_every": 1, "save_every": 0, "threads": 1,
        "backprop_turns": 3, "report_to": [],
    },
    "eval": {"turns": []},
}  # fmt: skip


def run_config(folder, **changes):
    text = folder / "text.txt"
    text.write_text("One and two are three, and three and four are seven. " * 40)
    config = RUN | {"method": "stars", "out": str(folder / "run")} | changes
    return config_from(config | {"data": config["data"] | {"source": str(text)}})


@pytest.mark.parametrize("at", ["next", "last"])
def test_a_steps_gradient_is_that_by_hand(at, tmp_path):
    """Token loss over the last 2 of 4 turns, and the penalty at the state before the dual turn."""
    config = run_config(
        tmp_path,
        penalty={"at": at, "detach": at == "next", "fraction": 1.0, "weight": 0.3},
        train=RUN["train"] | {"backprop_turns": 2},
    )
    net = model()
    loop = families()["huginn"].loop(net)
    ids = tokens(3, 8).numpy()
    batch = micro_batch(PaddedChats(TokenDocuments([(row, row >= 0) for row in ids]), 0), [0, 1, 2])
    plan = StepPlan(step=0, turns=[4], weight=0.3, lr=0.0)
    loss, (token_loss, penalty) = StepLoss(loop, config)(batch, plan, 4, len(batch.labels))
    parameters = list(net.parameters())
    found = torch.autograd.grad(loss, parameters)

    start = loop.begin(batch.tokens, batch.samples)
    turn = loop.turn(start.state, batch.samples, start.inputs)
    h = start.state
    for _ in range(2):
        h = turn(h).detach()
    states = [h := turn(h) for _ in range(2)]
    place = states[-1] if at == "next" else states[-2]
    v = sample_noise(place, batch.samples, config.seed, plan.step, range(3))
    place = place.detach() if at == "next" else place
    expected = fused_jsrr(turn, place, v=v, mask=batch.samples.real, detach=at == "next")
    by_hand = plain_loss(net.read(states[-1], net.prepare(h)), batch.tokens)
    torch.testing.assert_close(token_loss, by_hand.detach())
    torch.testing.assert_close(penalty, expected.detach())
    total = config.penalty.combine(by_hand, expected, 0.3)
    for a, b in zip(found, torch.autograd.grad(total, parameters), strict=True):
        assert relative_error(a, b) <= 1e-9


def shares(loop, config, batch):
    """The parts of the loss, and its gradient."""
    plan = StepPlan(step=0, turns=[3], weight=0.3, lr=0.0)
    loss, parts = StepLoss(loop, config)(batch, plan, 3, len(batch.labels))
    return parts, torch.autograd.grad(loss, list(loop.model.parameters()))


@pytest.mark.parametrize("at", ["next", "last"])
@each_shape
def test_packed_and_padded_documents_have_one_loss_and_gradient(shape, at, tmp_path):
    config = run_config(tmp_path, penalty={"at": at, "detach": at == "next", "weight": 0.3})
    loop = families()["huginn"].loop(model(shape))
    documents = [tokens(1, length, seed=length)[0].numpy() for length in (7, 4, 9)]
    packed = micro_batch(PackedChats(as_documents(documents), 24, 0), [0])
    order = [row.numpy() for row in packed.samples.per_sample(packed.tokens[0][None])]
    padded = micro_batch(PaddedChats(as_documents(order), 0), [0, 1, 2])
    assert packed.samples.packed
    assert not padded.samples.packed
    (one, mine), (two, theirs) = (shares(loop, config, each) for each in (packed, padded))
    torch.testing.assert_close(one, two, rtol=1e-6, atol=0)  # reported in fp32
    for a, b in zip(mine, theirs, strict=True):
        assert relative_error(a, b) <= 1e-9


@pytest.mark.parametrize("packed", [False, True])
def test_in_training_the_noise_of_a_sample_does_not_depend_on_the_split(packed, tmp_path):
    config = run_config(tmp_path)
    loop = families()["huginn"].loop(model().train())
    rows = as_documents(tokens(4, 8).numpy())
    source = PackedChats(rows, 16, 0) if packed else PaddedChats(rows, 0)

    def start(units, first, step=0):
        batch = micro_batch(source, units, first=first)
        return MicroStep(loop, batch, config, step).first.reshape(-1, 8, 32)

    half = [0] if packed else [0, 1]
    other = [1] if packed else [2, 3]
    whole = start([*half, *other], 0)
    parts = torch.cat((start(half, 0), start(other, 2)))
    assert torch.equal(whole, parts)
    assert not torch.isclose(whole, start([*half, *other], 0, step=1)).any()
    assert all(not torch.isclose(whole[i], whole[j]).any() for i in range(4) for j in range(i))


def as_documents(rows):
    return TokenDocuments([(row, row >= 0) for row in rows])


@pytest.mark.parametrize("at", ["next", "last"])
def test_a_part_of_the_samples_takes_its_own_inputs_along(at, tmp_path):
    """The penalty of one sample of three, which are drawn anew each step."""
    penalty = {"at": at, "detach": at == "next", "fraction": 0.34, "weight": 0.3}
    config = run_config(tmp_path, penalty=penalty)
    net = model()
    loop = families()["huginn"].loop(net)
    batch = micro_batch(PaddedChats(as_documents(tokens(3, 8).numpy()), 0), [0, 1, 2])
    (_, found), gradient = shares(loop, config, batch)
    start = loop.begin(batch.tokens, batch.samples)
    turn = loop.turn(start.state, batch.samples, start.inputs)
    states = [start.state]
    for _ in range(3):
        states.append(turn(states[-1]))
    (row,) = draw_samples(3, 1, config.seed, 0, batch.index)
    place = states[3 if at == "next" else 2][row : row + 1]
    place = place.detach() if at == "next" else place
    v = sample_noise(place, batch.samples.subset([row]).tokens, config.seed, 0, [row])
    block = looped_block(net, inputs=start.inputs[row : row + 1])
    expected = fused_jsrr(block, place, v=v, detach=at == "next")
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)
    by_hand = plain_loss(net.read(states[-1], net.prepare(place.expand(3, -1, -1))), batch.tokens)
    total = config.penalty.combine(by_hand, expected, 0.3)
    for a, b in zip(gradient, torch.autograd.grad(total, list(net.parameters())), strict=True):
        assert relative_error(a, b) <= 1e-9


@pytest.mark.slow
@each_shape
def test_the_loss_falls(shape, tmp_path):
    config = run_config(tmp_path, model=RUN["model"] | {"shape": shape})
    result = train(config)
    rows = [row for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 30
    first, last = (sum(row["loss"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last < 0.7 * first
    assert all(row["penalty"] > 0 for row in rows)
