"""The head's chunked cross entropy against F.cross_entropy of all logits."""

import sys

import pytest
import torch
import torch.nn.functional as F
from oracle import randn, relative_error
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stars_fast.ops import linear_cross_entropy as module
from stars_fast.ops.linear_cross_entropy import (
    chunk_rows,
    linear_cross_entropy,
    supervised_positions,
)

# Rounding of sums of a few hundred terms of 1e-16.
FP64 = 1e-12
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def case(*shape, vocab=13, width=6, dtype=torch.float64, ignored=0.4, seed=0):
    """hidden, weight, labels: a share of the labels is -100."""
    generator = torch.Generator().manual_seed(seed)
    hidden = randn(*shape, width, seed=seed).to(dtype)
    weight = randn(vocab, width, seed=seed + 1).to(dtype)
    labels = torch.randint(0, vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def plain(hidden, weight, labels, weights=None, count=None):
    """All logits at once."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    nll = F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)
    total = (nll if weights is None else nll * weights).sum()
    return total / ((labels != -100).sum() if count is None else count), nll


def assert_same(got, expected, leaves):
    """Loss and the gradient of every leaf."""
    assert relative_error(got, expected) <= FP64
    grads = torch.autograd.grad(got, leaves)
    for mine, reference in zip(grads, torch.autograd.grad(expected, leaves), strict=True):
        assert relative_error(mine, reference) <= FP64


@pytest.mark.parametrize("chunk", [None, 1, 3, 7, 100])
def test_value_and_gradients(chunk):
    hidden, weight, labels = case(3, 11)
    weights = torch.rand(3, 11, dtype=torch.float64).requires_grad_()
    got = linear_cross_entropy(hidden, weight, labels, weights=weights, chunk=chunk)
    expected, nll = plain(hidden, weight, labels, weights)
    assert not got.nll.requires_grad
    torch.testing.assert_close(got.nll, nll.detach(), rtol=FP64, atol=FP64)
    assert_same(got.loss, expected, (hidden, weight, weights))


COUNTS = [None, 3, 2.5, torch.tensor(40), torch.tensor([7.0], dtype=torch.float64)]


@pytest.mark.parametrize("count", COUNTS, ids=str)
def test_mean_and_sum(count):
    hidden, weight, labels = case(2, 9)
    got = linear_cross_entropy(hidden, weight, labels, count=count, chunk=4)
    expected, _ = plain(hidden, weight, labels, count=count)
    assert got.loss.shape == ()
    assert got.loss.dtype == torch.float64
    assert_same(got.loss, expected.squeeze(), (hidden, weight))
    if count is None:
        assert_same(
            linear_cross_entropy(hidden, weight, labels, reduction="sum").loss,
            F.cross_entropy(
                F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="sum"
            ),
            (hidden, weight),
        )


def test_incoming_gradient_scales_and_the_graph_can_be_used_again():
    hidden, weight, labels = case(4)
    loss = linear_cross_entropy(hidden, weight, labels).loss
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    scaled = torch.autograd.grad(loss, (hidden, weight), torch.tensor(-2.5, dtype=torch.float64))
    for a, b in zip(once, scaled, strict=True):
        torch.testing.assert_close(-2.5 * a, b, rtol=FP64, atol=FP64)


def test_gradcheck():
    hidden, weight, labels = case(5, vocab=4, width=3)
    weights = torch.rand(5, dtype=torch.float64).requires_grad_()

    def loss(hidden, weight, weights):
        return linear_cross_entropy(hidden, weight, labels, weights=weights, chunk=2).loss

    assert torch.autograd.gradcheck(loss, (hidden, weight, weights))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 5)], ids=str)
def test_shapes(shape):
    hidden, weight, labels = case(*shape, ignored=0.0)
    got = linear_cross_entropy(hidden, weight, labels)
    assert got.nll.shape == shape
    expected = F.cross_entropy(F.linear(hidden, weight).reshape(-1, 13), labels.reshape(-1))
    assert_same(got.loss, expected, (hidden, weight))


def test_memory_order_does_not_matter():
    hidden, weight, labels = case(7, 3)
    turned = hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    columns = weight.detach().t().contiguous().t().requires_grad_()
    striped = torch.stack((labels, labels), -1)[..., 0]
    assert not any(x.is_contiguous() for x in (turned, columns, striped))
    got = linear_cross_entropy(turned, columns, striped, chunk=4)
    expected, _ = plain(turned, columns, labels)
    assert_same(got.loss, expected, (turned, columns))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_ignored_rows_are_never_touched(bad):
    hidden, weight, labels = case(2, 9)
    clean = linear_cross_entropy(hidden, weight, labels)
    poisoned = hidden.detach().clone()
    poisoned[labels == -100] = bad
    poisoned.requires_grad_()
    weights = torch.ones(2, 9, dtype=torch.float64)
    weights[labels == -100] = bad
    got = linear_cross_entropy(poisoned, weight, labels, weights=weights.requires_grad_())
    assert torch.equal(got.loss, clean.loss)
    assert torch.equal(got.nll, clean.nll)
    grads = torch.autograd.grad(got.loss, (poisoned, weight, weights))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][labels == -100].any()
    assert not grads[2][labels == -100].any()
    assert torch.equal(grads[0], torch.autograd.grad(clean.loss, hidden)[0])


def test_positions_of_the_data_loader():
    hidden, weight, labels = case(2, 9)
    positions = supervised_positions(labels)
    assert torch.equal(labels.flatten()[positions], labels[labels != -100])
    own = linear_cross_entropy(hidden, weight, labels)
    given = linear_cross_entropy(hidden, weight, labels, supervised=positions)
    assert torch.equal(own.loss, given.loss)
    assert torch.equal(own.nll, given.nll)
    other = labels.masked_fill(labels == -100, 5)
    alone = linear_cross_entropy(hidden, weight, other, supervised=positions)
    assert torch.equal(own.loss, alone.loss)
    seven = labels.masked_fill(labels == -100, 7)
    expected = F.cross_entropy(
        F.linear(hidden, weight).flatten(0, 1), seven.flatten(), ignore_index=7
    )
    got = linear_cross_entropy(hidden, weight, seven, ignore_index=7)
    assert relative_error(got.loss, expected) <= FP64
    assert got.nll[seven == 7].eq(0).all()


def test_every_position_is_supervised_without_an_ignore_index():
    hidden, weight, labels = case(2, 9, ignored=0.0)
    got = linear_cross_entropy(hidden, weight, labels, ignore_index=None)
    assert_same(got.loss, plain(hidden, weight, labels)[0], (hidden, weight))


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, None])
def test_nothing_supervised(count, ignore_index):
    shape = (2, 0) if ignore_index is None else (2, 3)
    hidden, weight, labels = case(*shape, ignored=1.1)
    weights = torch.ones(shape, dtype=torch.float64).requires_grad_()
    got = linear_cross_entropy(
        hidden, weight, labels, weights=weights, count=count, ignore_index=ignore_index
    )
    assert got.loss.item() == 0.0
    assert got.nll.shape == shape
    grads = torch.autograd.grad(got.loss, (hidden, weight, weights))
    for leaf, grad in zip((hidden, weight, weights), grads, strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_a_count_of_0_on_a_device_is_not_looked_at():
    hidden, weight, labels = case(2, 3, ignored=0.0)
    loss = linear_cross_entropy(hidden, weight, labels, count=torch.tensor(0)).loss
    assert not loss.isfinite()
    assert not torch.autograd.grad(loss, hidden)[0].isfinite().any()


def test_weight_tied_to_the_embedding():
    _, weight, labels = case(2, 9)
    tokens = torch.randint(0, 13, (2, 9))
    hidden = torch.tanh(F.embedding(tokens, weight))
    expected, _ = plain(hidden, weight, labels)
    assert_same(
        linear_cross_entropy(torch.tanh(F.embedding(tokens, weight)), weight, labels).loss,
        expected,
        (weight,),
    )


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("mixed_products", [False, True])
def test_low_precision_error_is_at_most_twice_that_of_eager(name, mixed_products, monkeypatch):
    """Against fp64 on the same rounded inputs; eager is F.linear + F.cross_entropy in that dtype
    (fp32 logits, as a trainer casts them)."""
    if mixed_products:  # what a GPU does in one product, here in two steps
        monkeypatch.setattr(module, "_mixed_products", lambda device: True)
        monkeypatch.setattr(torch, "addmm", _addmm)
    dtype = DTYPES[name]
    hidden, weight, labels = case(64, vocab=97, width=32, dtype=dtype, ignored=0.2)
    weight.data.mul_(0.3)

    def eager(hidden, weight):
        logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
        return F.cross_entropy(logits, labels)

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = eager(*exact)
    truth = (loss, *torch.autograd.grad(loss, exact))
    loss = eager(hidden, weight)
    theirs = (loss, *torch.autograd.grad(loss, (hidden, weight)))
    loss = linear_cross_entropy(hidden, weight, labels, chunk=10).loss
    assert loss.dtype == torch.float32
    mine = (loss, *torch.autograd.grad(loss, (hidden, weight)))
    assert [x.dtype for x in mine[1:]] == [dtype, dtype]
    for got, reference, true in zip(mine, theirs, truth, strict=True):
        slack = 2 * torch.finfo(torch.float32).eps
        assert relative_error(got, true) <= 2 * relative_error(reference, true) + slack


def _addmm(total, a, b, *, out_dtype, out):
    assert out is total
    return out.add_(a.to(out_dtype) @ b.to(out_dtype))


def test_fp16_gradients_of_a_mean_over_many_tokens_do_not_underflow():
    """Divided by 1e6 before its products, every logit's gradient would be 0 in fp16."""
    hidden, weight, labels = case(64, vocab=97, width=32, dtype=torch.float16, ignored=0.0)
    scale = 2.0**16
    loss = linear_cross_entropy(hidden, weight, labels, count=1e6).loss
    grads = torch.autograd.grad(loss * scale, (hidden, weight))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss, _ = plain(*exact, labels, count=1e6)
    for got, true in zip(grads, torch.autograd.grad(loss * scale, exact), strict=True):
        assert relative_error(got, true) <= 2e-3  # a few roundings of 5e-4


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_autocast(hidden_dtype):
    """Products in bf16, results in the leaves' dtypes; weight's gradient is never rounded."""
    hidden, weight, labels = case(3, 11, dtype=torch.float32)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, labels, chunk=4)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    alone = linear_cross_entropy(*low, labels, chunk=4)
    assert torch.equal(got.loss, alone.loss)
    assert torch.equal(got.nll, alone.nll)
    grads = torch.autograd.grad(got.loss, (hidden, weight))
    assert [grad.dtype for grad in grads] == [hidden_dtype, torch.float32]
    for a, b in zip(grads, torch.autograd.grad(alone.loss, low), strict=True):
        torch.testing.assert_close(a.bfloat16(), b, rtol=2**-7, atol=0)


def test_fp64_stays_fp64_under_autocast():
    hidden, weight, labels = case(3, 11)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, labels)
    assert_same(got.loss, plain(hidden, weight, labels)[0], (hidden, weight))


class Allocations(TorchDispatchMode):
    """Of the tensors made inside: the largest number of elements, and the most bytes held at a
    time. And the number of products."""

    def __init__(self):
        super().__init__()
        self.largest, self.peak, self.products = 0, 0, 0
        self.held = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.note((args, kwargs), own=False)
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        self.note(out, own=True)
        return out

    def note(self, tree, own):
        for x in tree_leaves(tree):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.held.setdefault(StorageWeakRef(storage), own * storage.nbytes())
                self.largest = max(self.largest, own * x.numel())
        self.held = {ref: size for ref, size in self.held.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.held.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_tensor_of_tokens_times_vocabulary(dtype):
    tokens, vocab, width, chunk = 60, 101, 8, 7
    hidden, weight, labels = case(tokens, vocab=vocab, width=width, dtype=dtype, ignored=0.0)
    with Allocations() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk=chunk).loss.backward()
    assert seen.largest == max(vocab * width, chunk * vocab)
    with Allocations() as all_at_once:
        plain(hidden, weight, labels)[0].backward()
    assert all_at_once.largest == tokens * vocab


@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", [*DTYPES, "fp64", "autocast"])
def test_memory_is_what_is_promised(name, grads, monkeypatch):
    tokens, vocab, width, chunk = 160, 1024, 80, 64
    dtype = {**DTYPES, "fp64": torch.float64, "autocast": torch.float32}[name]
    hidden, weight, labels = case(tokens, vocab=vocab, width=width, dtype=dtype, ignored=0.0)
    wide = 8 if name == "fp64" else 4
    logits = 2 * chunk * vocab * wide
    monkeypatch.setattr(module, "_CHUNK_BYTES", logits)
    kept = hidden.nbytes * grads[0] + weight.numel() * wide * grads[1]
    cast = vocab * width * 2 if name == "autocast" else 0
    small = 3 * chunk * width * wide + 6 * tokens * 8  # a chunk's rows and products; labels, nll
    hidden.requires_grad_(grads[0])
    weight.requires_grad_(grads[1])
    positions = torch.arange(tokens)
    enabled = name == "autocast"
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled), Allocations() as seen:
        loss = linear_cross_entropy(hidden, weight, labels, supervised=positions).loss
    promised = logits + hidden.nbytes + kept + cast
    assert promised <= seen.peak <= promised + small
    seen.note(loss, own=False)
    assert kept <= sum(seen.held.values()) <= kept + 6 * tokens * 8


@pytest.mark.parametrize(
    ("hidden_grad", "weight_grad", "products"),
    [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 1)],
)
def test_only_the_gradients_that_are_wanted_are_computed(hidden_grad, weight_grad, products):
    hidden, weight, labels = case(12, ignored=0.0)
    hidden.requires_grad_(hidden_grad)
    weight.requires_grad_(weight_grad)
    weights = torch.rand(12, dtype=torch.float64).requires_grad_()
    with Allocations() as seen:
        loss = linear_cross_entropy(hidden, weight, labels, weights=weights, chunk=6).loss
        loss.backward()
    assert seen.products == 2 * products
    assert (hidden.grad is not None, weight.grad is not None) == (hidden_grad, weight_grad)
    assert weights.grad is not None
    with Allocations() as seen, torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, chunk=6).loss
    assert seen.products == 2
    assert not loss.requires_grad


def test_chunks_stay_within_their_bytes():
    assert chunk_rows(0, 49152, torch.float32) == 1
    assert chunk_rows(1000, 49152, torch.float32) == 1000
    assert chunk_rows(4096, 49152, torch.float32) == 1024
    assert chunk_rows(10, 2**30, torch.float32) == 1
    assert chunk_rows(100, 2**21, torch.float32) == 25  # 32 would fit: four chunks
    for tokens in (1366, 5000, 100000):
        for vocab in (50257, 151936, 262144):
            for dtype in (torch.float32, torch.float64):
                rows = chunk_rows(tokens, vocab, dtype)
                assert 2 * rows * vocab * dtype.itemsize <= 512 * 2**20
                fewest = -(-tokens * vocab * dtype.itemsize // (256 * 2**20))
                assert -(-tokens // rows) <= 1.2 * fewest + 1


def test_transforms_are_refused():
    hidden, weight, labels = case(4)

    def loss(hidden):
        return linear_cross_entropy(hidden, weight, labels).loss

    for run in (
        lambda: torch.func.grad(loss)(hidden),
        lambda: torch.func.vmap(loss)(hidden.expand(2, 4, 6)),
        lambda: torch.func.jvp(loss, (hidden,), (hidden,)),
    ):
        with pytest.raises(RuntimeError):
            run()


def test_a_second_derivative_is_refused():
    hidden, weight, labels = case(4)
    loss = linear_cross_entropy(hidden, weight, labels).loss
    with pytest.raises(RuntimeError, match="expected a first derivative, got create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_arguments_that_do_not_fit_are_named():
    hidden, weight, labels = case(3, 5)
    raises = pytest.raises

    def run(hidden=hidden, weight=weight, labels=labels, **options):
        return linear_cross_entropy(hidden, weight, labels, **options)

    with raises(TypeError, match=r"hidden: expected floating point, got torch\.int64"):
        run(hidden=hidden.long())
    with raises(TypeError, match=r"weight: expected the dtype of hidden, .*64, got .*32"):
        run(weight=weight.float())
    with raises(ValueError, match=r"weight: expected \[V, D\] .*, got \[6, 13\] for \[3, 5, 6\]"):
        run(weight=weight.t())
    with raises(ValueError, match=r"V, D >= 1, got \[0, 6\] for \[3, 5, 6\]"):
        run(weight=weight[:0])
    with raises(ValueError, match=r"V, D >= 1, got \[13, 0\] for \[3, 5, 0\]"):
        run(hidden=hidden[..., :0], weight=weight[:, :0])
    for name in ("hidden", "weight", "labels", "weights", "supervised"):
        with raises(TypeError, match=f"linear_cross_entropy: {name}: expected a tensor, got list"):
            run(**{name: [1.0]})
    with raises(TypeError, match=r"labels: expected int64, got torch\.int32"):
        run(labels=labels.int())
    with raises(ValueError, match=r"labels: expected shape \[3, 5\], got \[15\]"):
        run(labels=labels.flatten())
    with raises(ValueError, match=r"labels at .*: expected a value in \[0, 13\), got 13 to 13"):
        run(labels=torch.full((3, 5), 13))
    with raises(ValueError, match=r"labels at .*: expected a value in \[0, 13\), got -100"):
        run(ignore_index=None)
    with raises(ValueError, match=r"weights: expected shape \[3, 5\], got \[3\]"):
        run(weights=torch.ones(3))
    with raises(TypeError, match="weights: expected floating point"):
        run(weights=torch.ones(3, 5, dtype=torch.int64))
    with raises(ValueError, match="reduction: expected 'mean' or 'sum', got 'none'"):
        run(reduction="none")
    with raises(ValueError, match="count: expected None with reduction='sum', got 3"):
        run(reduction="sum", count=3)
    with raises(ValueError, match="count: expected a positive number, got 0"):
        run(count=0)
    for count in ("3", [3]):
        with raises(TypeError, match="count: expected a number or a tensor, got .*3"):
            run(count=count)
        with raises(TypeError, match="count: expected a number or a tensor, got .*3"):
            run(labels=torch.full((3, 5), -100), count=count)
    with raises(ValueError, match="count: expected a tensor on cpu or the CPU, got meta"):
        run(count=torch.ones((), device="meta"))
    with raises(ValueError, match=r"count: expected one number without gradient, got shape \[2\]"):
        run(count=torch.ones(2))
    with raises(ValueError, match="chunk: expected an integer >= 1, got 0"):
        run(chunk=0)
    with raises(TypeError, match=r"supervised: expected int64, got torch\.bool"):
        run(supervised=labels != -100)
    with raises(ValueError, match=r"supervised: expected \[N\] with N <= 15, got \[1, 2\]"):
        run(supervised=torch.zeros(1, 2, dtype=torch.int64))
    with raises(ValueError, match=r"supervised: expected a value in \[0, 15\), got 15 to 15"):
        run(supervised=torch.tensor([15]))
    with raises(ValueError, match="backend: expected 'torch', 'liger' or None, got 'cuda'"):
        run(backend="cuda")
    with raises(ValueError, match="labels: expected a tensor on cpu, got meta"):
        run(labels=labels.to("meta"))


def test_liger_that_is_absent_or_too_old_or_without_a_gpu(monkeypatch):
    hidden, weight, labels = case(3, 5)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="backend='liger' needs hidden on CUDA, got cpu"):
        linear_cross_entropy(hidden, weight, labels, backend="liger")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ImportError, match="needs the package liger-kernel >= "):
        linear_cross_entropy(hidden, weight, labels, backend="liger")


def test_liger():
    pytest.importorskip("liger_kernel")
    hidden, weight, labels = case(9, vocab=40, width=16, dtype=torch.float32)
    weights = torch.rand(9).requires_grad_()
    leaves = (hidden, weight, weights)
    got = linear_cross_entropy(*leaves[:2], labels, weights=weights, count=5, backend="liger")
    own = linear_cross_entropy(*leaves[:2], labels, weights=weights, count=5)
    torch.testing.assert_close(got.nll, own.nll)
    torch.testing.assert_close(got.loss, own.loss)
    theirs = torch.autograd.grad(got.loss, leaves)
    for a, b in zip(theirs, torch.autograd.grad(own.loss, leaves), strict=True):
        torch.testing.assert_close(a, b)
