"""embedding_bag of pairs. It is linear in its weights and in those of the samples, so that its
tangent and its gradients are those of itself on tangents, which torch has."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stars_fast import fused_jsrr, fused_jvp

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
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(jv, tangent, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad((a * plain + b * tangent).sum(), leaves)
    for found, right in zip(got, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


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
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_largest_of_a_bag_is_refused():
    with pytest.raises(RuntimeError, match="embedding_bag with mode 'max'"):
        fused_jvp(lambda x: F.embedding_bag(BAGS, x, mode="max"), *[numbers(ROWS, WIDTH)] * 2)
