"""Ouro's exit objective against the sum over turns written out."""

import gc

import pytest
import torch
import torch.nn.functional as F
from oracle import randn, relative_error

from stars_fast.models.ouro import exit_loss as module
from stars_fast.models.ouro.exit_loss import exit_distribution, exit_weighted_loss

FP64 = 1e-12


def case(turns=4, shape=(2, 7), vocab=11, width=5, seed=0):
    states = [randn(*shape, width, seed=seed + turn).requires_grad_() for turn in range(turns)]
    gates = randn(turns, *shape, seed=20).requires_grad_()
    weight = randn(vocab, width, seed=21).requires_grad_()
    labels = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
    labels[torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4] = -100
    return states, gates, weight, labels


def written_out(gates):
    """p_t by the products of the definition."""
    leave = torch.sigmoid(gates)
    left, exits = torch.ones_like(gates[0]), []
    for turn in range(len(gates) - 1):
        exits.append(left * leave[turn])
        left = left * (1 - leave[turn])
    return torch.stack([*exits, left])


def plain(states, gates, weight, labels, beta, count=None):
    p = written_out(gates)
    nll = torch.stack(
        [
            F.cross_entropy((h @ weight.T).flatten(0, 1), labels.flatten(), reduction="none")
            for h in states
        ]
    ).view(p.shape)
    entropy = -(p * p.log()).sum(0)
    real = labels != -100
    per_token = (p * nll).sum(0) - beta * entropy
    return per_token[real].sum() / (real.sum() if count is None else count), nll, p


@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_value_and_gradients(turns, beta):
    states, gates, weight, labels = case(turns)
    got = exit_weighted_loss(states, gates, weight, labels, beta=beta, chunk=5)
    expected, nll, p = plain(states, gates, weight, labels, beta)
    real = labels != -100
    torch.testing.assert_close(got.nll, nll.detach() * real, rtol=FP64, atol=FP64)
    torch.testing.assert_close(got.exits, p.detach() * real, rtol=FP64, atol=FP64)
    assert not any(x.requires_grad for x in (got.nll, got.exits))
    assert relative_error(got.loss, expected) <= FP64
    leaves = (*states, gates, weight)
    grads = torch.autograd.grad(got.loss, leaves)
    reference = torch.autograd.grad(expected, leaves, allow_unused=True)
    for mine, true in zip(grads, reference, strict=True):
        assert relative_error(mine, torch.zeros_like(mine) if true is None else true) <= FP64


@pytest.mark.parametrize("count", [3, torch.tensor(40)], ids=str)
def test_count_of_a_whole_window(count):
    states, gates, weight, labels = case()
    positions = (labels.flatten() != -100).nonzero().squeeze(1)
    got = exit_weighted_loss(states, gates, weight, labels, count=count, supervised=positions)
    expected, _, _ = plain(states, gates, weight, labels, 0.1, count)
    assert relative_error(got.loss, expected) <= FP64


def test_gradcheck():
    states, gates, weight, labels = case(turns=3, shape=(1, 4), vocab=4, width=2)
    labels[0, 0] = 1

    def loss(gates, weight, *states):
        return exit_weighted_loss(states, gates, weight, labels, chunk=3).loss

    assert torch.autograd.gradcheck(loss, (gates, weight, *states))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_distribution(dtype):
    gates = (4 * randn(5, 3, 6)).to(dtype)
    p = exit_distribution(gates)
    assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    one = torch.ones(3, 6, dtype=p.dtype)
    torch.testing.assert_close(p.sum(0), one)
    torch.testing.assert_close(p.double(), written_out(gates.double()), rtol=1e-5, atol=1e-12)
    other = gates.clone()
    other[-1] += 3  # the last turn takes the rest whatever its gate says
    assert torch.equal(exit_distribution(other), p)
    assert torch.equal(exit_distribution(gates[:1]), one[None])


def test_distribution_of_extreme_gates():
    """Where 1 - sigmoid is 0 in fp32, the rest is still there, and so is its gradient."""
    gates = torch.tensor([[40.0], [0.0], [0.0]], requires_grad=True)
    p = exit_distribution(gates)
    true = exit_distribution(gates.detach().double())
    torch.testing.assert_close(p[1:].double(), true[1:], rtol=1e-5, atol=0)
    assert p[1] > 0
    gates = torch.tensor([[300.0, -300.0], [-300.0, 300.0], [0.0, 0.0]], requires_grad=True)
    p = exit_distribution(gates)
    torch.testing.assert_close(p.detach(), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    (grad,) = torch.autograd.grad(p[1].sum(), gates)
    assert grad.isfinite().all()


def test_extreme_gates_leave_loss_and_gradients_finite():
    states, gates, weight, labels = case()
    gates = (200 * gates.detach().float().sign()).requires_grad_()
    leaves = [x.detach().float().requires_grad_() for x in (*states, weight)]
    got = exit_weighted_loss(leaves[:-1], gates, leaves[-1], labels)
    grads = torch.autograd.grad(got.loss, (gates, *leaves))
    assert all(x.isfinite().all() for x in (got.loss, *grads))


def test_entropy_pulls_towards_a_uniform_choice():
    """With equal token losses the best gates leave with 1/T at every turn."""
    state = randn(1, 6, 5)
    weight, labels = randn(11, 5, seed=1), torch.arange(6)[None]
    leave = torch.tensor([1 / 4, 1 / 3, 1 / 2, 1 / 2], dtype=torch.float64)
    gates = leave.logit()[:, None, None].expand(4, 1, 6).clone().requires_grad_()
    loss = exit_weighted_loss([state] * 4, gates, weight, labels, beta=1.0).loss
    (grad,) = torch.autograd.grad(loss, gates)
    assert grad.abs().max() < FP64
    torch.testing.assert_close(exit_distribution(gates), torch.full((4, 1, 6), 0.25).double())


def test_ignored_tokens_are_never_touched():
    states, gates, weight, labels = case()
    clean = exit_weighted_loss(states, gates, weight, labels)
    poisoned = [h.detach().masked_fill((labels == -100)[..., None], torch.nan) for h in states]
    bad = gates.detach().masked_fill(labels == -100, torch.nan).requires_grad_()
    leaves = [h.requires_grad_() for h in poisoned]
    got = exit_weighted_loss(leaves, bad, weight, labels)
    assert torch.equal(got.loss, clean.loss)
    grads = torch.autograd.grad(got.loss, (*leaves, bad, weight))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("count", [None, torch.tensor(0)], ids=str)
def test_nothing_supervised(count):
    states, gates, weight, labels = case()
    got = exit_weighted_loss(states, gates, weight, labels.fill_(-100), count=count)
    assert got.loss.item() == 0.0
    leaves = (*states, gates, weight)
    for leaf, grad in zip(leaves, torch.autograd.grad(got.loss, leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_one_copy_of_the_supervised_rows_is_there_during_the_pass(monkeypatch):
    states, gates, weight, labels = case(turns=3, width=37)
    count, seen = int((labels != -100).sum()), []
    original = module.summed_loss

    def watched(*args):
        shapes = [x.shape for x in gc.get_objects() if type(x) is torch.Tensor]
        seen.append((shapes.count((count, 37)), shapes.count((3 * count, 37))))
        return original(*args)

    monkeypatch.setattr(module, "summed_loss", watched)
    exit_weighted_loss(states, gates, weight, labels)
    assert seen == [(0, 1)]


def test_arguments_that_do_not_fit_are_named():
    states, gates, weight, labels = case()
    with pytest.raises(ValueError, match=r"gates must be \[3, 2, 7\] for 3 states"):
        exit_weighted_loss(states[:3], gates, weight, labels)
    with pytest.raises(ValueError, match="states must be a tensor a turn, one at least, got none"):
        exit_weighted_loss([], gates, weight, labels)
    with pytest.raises(ValueError, match=r"states\[1\] must be \[2, 7, 5\], got \[2, 6, 5\]"):
        exit_weighted_loss([states[0], states[1][:, :6], *states[2:]], gates, weight, labels)
    with pytest.raises(TypeError, match=r"gates must be floating point, got torch\.int64"):
        exit_weighted_loss(states, gates.long(), weight, labels)
    with pytest.raises(TypeError, match=r"gates must be floating point, got torch\.int64"):
        exit_distribution(gates.long())
    with pytest.raises(ValueError, match=r"gates must be \[T, ...\] with T >= 1, got \[0, 2\]"):
        exit_distribution(torch.zeros(0, 2))
    with pytest.raises(ValueError, match=r"supervised must be in \[0, 14\), got 14 to 14"):
        exit_weighted_loss(states, gates, weight, labels, supervised=torch.tensor([14]))
    with pytest.raises(ValueError, match="exit_weighted_loss: count must be positive, got -1"):
        exit_weighted_loss(states, gates, weight, labels, count=-1)
    head = (states, gates, weight, labels)
    for place, name in enumerate((r"states\[0\]", "gates", "weight", "labels")):
        arguments = [*head[:place], [[1.0]], *head[place + 1 :]]
        with pytest.raises(TypeError, match=f"exit_weighted_loss: {name} must be a tensor, got "):
            exit_weighted_loss(*arguments)
    named = [
        (TypeError, "labels must be int64", (*head[:3], labels.int()), {}),
        (ValueError, r"labels must have shape \[2, 7\]", (*head[:3], labels[0]), {}),
        (ValueError, r"weight must be .* for states\[0\]", (*head[:2], weight.t(), labels), {}),
        (
            TypeError,
            "weight must have the dtype of states",
            (*head[:2], weight.float(), labels),
            {},
        ),
        (ValueError, "gates must be on cpu, got meta", (states, gates.to("meta"), *head[2:]), {}),
        (ValueError, r"labels at .* must be in \[0, 11\)", (*head[:3], labels + 11), {}),
        (ValueError, "chunk must be an integer >= 1, got 0", head, {"chunk": 0}),
        (ValueError, "backend must be 'torch', 'liger' or None", head, {"backend": "cuda"}),
        (TypeError, "supervised must be a tensor, got list", head, {"supervised": [1]}),
        (TypeError, "count must be a number or a tensor, got '3'", head, {"count": "3"}),
    ]
    for error, message, arguments, options in named:
        with pytest.raises(error, match=f"exit_weighted_loss: {message}"):
            exit_weighted_loss(*arguments, **options)
