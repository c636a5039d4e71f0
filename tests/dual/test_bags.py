"""embedding_bag of pairs. It is linear in its weights and in those of the samples, so that its
tangent and its gradients are those of itself on tangents, which torch has."""

import re

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from tolerances import OPS, TIMES_EAGER
from torch import nn

from stars_fast import fused_jsrr, fused_jvp

CLOSE = dict.fromkeys(("rtol", "atol"), OPS[torch.float64])
ROWS, WIDTH = 7, 4
BAGS = torch.tensor([[0, 3, 3, 6], [2, 1, 6, 0], [5, 5, 5, 5]])
FLAT, STARTS = BAGS.flatten(), torch.tensor([0, 0, 5, 12])  # the first and the last are empty
CALLS = {
    "bags": {"input": BAGS},
    "flat": {"input": FLAT, "offsets": STARTS},
    "flat, with the end": {
        "input": FLAT,
        "offsets": torch.tensor([0, 3, 3, 12]),
        "include_last_offset": True,
    },
    "padding": {"input": BAGS, "padding_idx": 5},
    "padding from the end": {"input": FLAT, "offsets": STARTS, "padding_idx": -1},
    "32 bits": {"input": FLAT.int(), "offsets": STARTS.int()},
}


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_exact(call, x, other):
    """`call(x, other)`, linear in x [pair] and in `other`, against itself on the tangent."""
    leaves = [x.requires_grad_(), other.requires_grad_()]
    v = numbers(*x.shape, seed=1)
    out, jv = fused_jvp(lambda y: call(y.sin(), other), x, v)
    a, b = numbers(*out.shape, seed=2), numbers(*out.shape, seed=3)
    got = torch.autograd.grad((a * out + b * jv).sum(), leaves)
    plain, tangent = call(x.sin(), other), call(x.cos() * v, other)
    torch.testing.assert_close(out, plain, **CLOSE)
    torch.testing.assert_close(jv, tangent, **CLOSE)
    expected = torch.autograd.grad((a * plain + b * tangent).sum(), leaves)
    for found, right in zip(got, expected, strict=True):
        torch.testing.assert_close(found, right, **CLOSE)


@pytest.mark.parametrize("name", CALLS)
def test_weights_of_samples_carry_a_tangent(name):
    def call(weights, table):
        given = {"mode": "sum", **CALLS[name], "per_sample_weights": weights}
        return F.embedding_bag(weight=table, **given)

    assert_exact(call, numbers(*CALLS[name]["input"].shape), numbers(ROWS, WIDTH, seed=4))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_table_carries_a_tangent(name, mode):
    def call(table, scale):
        return F.embedding_bag(weight=table, mode=mode, **CALLS[name]) * scale

    assert_exact(call, numbers(ROWS, WIDTH), numbers(WIDTH, seed=4))


def test_values_of_a_memory_are_read_by_weights_of_the_state():
    """A product-key memory's last step: values of the best keys, weighted by their scores."""
    torch.manual_seed(0)
    values = nn.EmbeddingBag(ROWS, WIDTH, mode="sum").double()
    keys = nn.Parameter(numbers(ROWS, WIDTH, seed=5))

    def block(h):
        scores, best = (h @ keys.mT).topk(3)
        weights = scores.softmax(-1)
        return h + values(best.flatten(0, 1), per_sample_weights=weights.flatten(0, 1)).view_as(h)

    def written_out(h):
        scores, best = (h @ keys.mT).topk(3)
        return h + (values.weight[best] * scores.softmax(-1)[..., None]).sum(-2)

    h, v = numbers(2, 5, WIDTH), numbers(2, 5, WIDTH, seed=6)
    leaves = [keys, values.weight]
    found = torch.autograd.grad(fused_jsrr(block, h, v=v), leaves)
    expected = torch.autograd.grad(fused_jsrr(written_out, h, v=v), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def pair(*shape, **options):
    return numbers(*shape).to(**options), numbers(*shape, seed=1).to(**options)


REFUSED = {
    "a mean with weights": {"input": BAGS, "per_sample_weights": torch.ones(3, 4).double()},
    "weights of another shape": {
        "input": BAGS,
        "mode": "sum",
        "per_sample_weights": torch.ones(4, 3).double(),
    },
    "weights of another dtype": {
        "input": BAGS,
        "mode": "sum",
        "per_sample_weights": torch.ones(3, 4),
    },
    "padding beyond the table": {"input": BAGS, "padding_idx": ROWS + 2},
    "padding before the table": {"input": BAGS, "padding_idx": -ROWS - 2},
    "bags beyond the end": {"input": FLAT, "offsets": torch.tensor([0, 13])},
    "bags that begin late": {"input": FLAT, "offsets": torch.tensor([1, 3])},
    "bags of bags": {"input": BAGS, "offsets": STARTS},
    "no bags": {"input": FLAT},
    "three dimensions": {"input": BAGS[None]},
    "another mode": {"input": BAGS, "mode": "product"},
    "no indices": {"input": BAGS.double()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_alike(name):
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as error:
        F.embedding_bag(weight=numbers(ROWS, WIDTH), **REFUSED[name])
    with pytest.raises(type(error.value), match=re.escape(str(error.value).splitlines()[0])):
        fused_jvp(lambda w: F.embedding_bag(weight=w, **REFUSED[name]), *pair(ROWS, WIDTH))


def test_a_table_of_one_dimension_is_refused_as_by_torch():
    with pytest.raises(ValueError, match="weight has to be a 2D Tensor"):
        fused_jvp(lambda w: F.embedding_bag(BAGS, w), *pair(ROWS))
    with pytest.raises(RuntimeError, match="argument #1 'indices'"):
        fused_jvp(lambda x: F.embedding_bag(x, x), *pair(ROWS, WIDTH))


def test_what_padding_holds_reaches_nothing():
    table, weights = numbers(ROWS, WIDTH), numbers(*BAGS.shape)
    table[5] = torch.nan
    weights[BAGS == 5] = torch.inf
    table.requires_grad_()

    def call(x):
        return F.embedding_bag(BAGS, table, mode="sum", padding_idx=5, per_sample_weights=x)

    weights.requires_grad_()
    out, jv = fused_jvp(call, weights, torch.ones_like(weights))
    found = torch.autograd.grad((out + jv).sum(), [weights, table])
    expected = torch.autograd.grad(
        (call(weights) + call(torch.ones_like(weights))).sum(), [weights, table]
    )
    torch.testing.assert_close(out, call(weights), **CLOSE)
    assert torch.equal(jv, call(torch.ones_like(weights)))
    assert found[0].isfinite().all()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_gradients_by_frequency_are_divided_by_it():
    table = numbers(ROWS, WIDTH).requires_grad_()

    def call(x):
        options = {"mode": "sum", "scale_grad_by_freq": True, "per_sample_weights": x}
        return F.embedding_bag(BAGS, table, **options)

    weights = numbers(*BAGS.shape)
    out, _ = fused_jvp(call, weights, torch.ones_like(weights))
    (found,) = torch.autograd.grad(out.sum(), table)
    sums = torch.zeros(ROWS, dtype=torch.float64).index_add(0, FLAT, weights.flatten())
    expected = sums / torch.bincount(FLAT, minlength=ROWS).clamp_min(1)
    torch.testing.assert_close(found, expected[:, None].expand_as(found), **CLOSE)


def test_rows_are_held_to_a_norm_and_gradients_may_be_sparse():
    weights = numbers(*BAGS.shape)

    def call(table, x):
        options = {"mode": "sum", "max_norm": 1.0, "sparse": True, "per_sample_weights": x}
        return F.embedding_bag(BAGS, table, **options)

    one, other = (numbers(ROWS, WIDTH).requires_grad_() for _ in range(2))
    out, jv = fused_jvp(lambda x: call(one, x), weights, torch.ones_like(weights))
    torch.testing.assert_close(out, call(other, weights), **CLOSE)
    assert torch.equal(one, other)
    assert one[FLAT].norm(dim=1).max() <= 1.0
    assert torch.autograd.grad(jv.sum(), one)[0].is_sparse
    table, v = pair(ROWS, WIDTH)
    table.requires_grad_()
    out, jv = fused_jvp(lambda x: F.embedding_bag(BAGS, x.sin(), mode="sum", sparse=True), table, v)
    assert torch.autograd.grad(jv.sum(), table)[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:Argument order of nn.functional.embedding_bag")
def test_the_order_of_long_ago_and_empty_inputs():
    table, v = pair(ROWS, WIDTH)
    out, jv = fused_jvp(lambda x: F.embedding_bag(x, BAGS), table, v)
    torch.testing.assert_close(out, F.embedding_bag(BAGS, table), **CLOSE)
    torch.testing.assert_close(jv, F.embedding_bag(BAGS, v), **CLOSE)
    none = torch.zeros(0, 4, dtype=torch.int64)
    out, jv = fused_jvp(lambda x: F.embedding_bag(none, x, mode="sum"), table, v)
    assert out.shape == jv.shape == (0, WIDTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_accurate_as_in_eager(dtype):
    index = torch.arange(300).reshape(3, 100) % 50
    table, x = numbers(50, WIDTH).to(dtype), numbers(3, 100).to(dtype)

    def call(t, w):
        return F.embedding_bag(index, t, mode="sum", per_sample_weights=w)

    v = x.sign()  # of unit RMS, so that it goes through the pass as it is
    out, jv = fused_jvp(lambda w: call(table, w), x, v)
    assert out.dtype == jv.dtype == dtype
    for found, weights in ((out, x), (jv, v)):
        exact = call(table.double(), weights.double())
        eager = relative_error(call(table, weights), exact)
        assert relative_error(found, exact) <= TIMES_EAGER * eager


def test_the_largest_of_a_bag_is_refused():
    with pytest.raises(RuntimeError, match="embedding_bag with mode 'max'"):
        fused_jvp(lambda x: F.embedding_bag(BAGS, x, mode="max"), *[numbers(ROWS, WIDTH)] * 2)
