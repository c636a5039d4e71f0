"""The backward whose kernels add to the queries' gradient, against autograd in fp64, in Triton's
interpreter. `conftest.py` of the ops fills all scratch but the zeroed sums with NaN."""

import pytest
import torch
from test_attention_triton import check, inputs, packed, randn, window

from stars_fast.ops.triton.attention import attention
from stars_fast.ops.triton.attention_backward import backward_by, design
from stars_fast.ops.triton.attention_fused import takes

# A query that sees nothing, between others that see the same keys: the keys' intervals have gaps.
GAP = packed(33)
GAP[0, 20] = 0
CASES = {
    # shape as in `DENSE`, spans, causal, exact
    "one-row": ((2, 1, 1, 1, 1, 16), None, False, False),
    "causal-grouped": ((1, 4, 2, 17, 17, 40), None, True, False),
    "more-keys": ((1, 2, 1, 17, 50, 16), None, False, False),
    "more-queries": ((1, 1, 1, 50, 17, 80), None, True, False),
    "packed": ((1, 2, 1, 35, 35, 16), packed(1, 20, -3, 1, 10), False, True),
    "packed-wide": ((1, 1, 1, 35, 35, 96), packed(20, -3, 12), False, True),
    "window": ((2, 1, 1, 33, 33, 16), window(33, 20), False, True),
    "gap": ((1, 1, 1, 33, 33, 80), GAP, False, False),
}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spans", "causal", "exact"), CASES.values(), ids=CASES.keys())
def test_gradients(shape, spans, causal, exact):
    check(*inputs(*shape), spans, causal, design="fused", exact=exact)


@pytest.mark.slow
def test_exact_intervals_of_keys_in_the_split_kernels():
    check(*inputs(1, 2, 1, 35, 35, 16), packed(1, 20, -3, 1, 10), exact=True)


def test_in_16_bits_with_a_negative_scale():
    check(*inputs(1, 1, 1, 33, 33, 16, torch.float16), None, True, -0.2, design="fused")


def test_keys_past_the_last_add_nothing_though_their_weights_are_infinite():
    """Logits of -1e4: next to them the logit 0 of keys that are not there weighs e^1e4."""
    q, k, v = inputs(1, 1, 1, 5, 5, 16)
    q[0], k[0] = 50, -50
    for causal in (False, True):
        setting = (None, None, causal, 1.0)
        out, lse, mu = attention(q, k, v, *setting)
        saved = randn(*q.shape, seed=9), q, k, v, out, lse, mu, *setting
        bars, wanted = backward_by("fused", *saved), backward_by("split", *saved)
        for bar, other in zip(bars, wanted, strict=True):
            # The same products, added in another order.
            torch.testing.assert_close(bar, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


def test_it_is_offered_where_it_has_tiles():
    assert takes(torch.zeros(2, 1, 1, 1, 64))
    assert takes(torch.zeros(2, 1, 1, 1, 128))
    assert not takes(torch.zeros(2, 1, 1, 1, 129))


def test_deterministic_algorithms_never_take_it(monkeypatch):
    monkeypatch.setenv("STARS_FAST_ATTENTION_BACKWARD", "fused")
    q = torch.zeros(2, 1, 1, 1, 64)
    assert torch.are_deterministic_algorithms_enabled()
    assert design(q) == "split"
    torch.use_deterministic_algorithms(False)
    assert design(q) == "fused"
