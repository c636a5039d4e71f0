"""Ops that a layer dispatches: what Python costs, as counts. More than these need a reason."""

import pytest

from benchmarks.host_cost import ops_a_layer

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("dual", "low", "most"),
    [
        (False, True, [56, 15, 69, 33]),
        (True, True, [108, 35, 165, 62]),
        (False, False, [59, 22, 99, 43]),
    ],
)
def test_a_layer_dispatches_no_more_ops_than_it_did(dual, low, most):
    """Forward, those that are launches, and the same backward."""
    found = ops_a_layer(dual, low)
    assert all(n <= limit for n, limit in zip(found, most, strict=True)), found
    assert found[1] >= 13  # 7 products, 3 norms, 2 rotations, a gate
