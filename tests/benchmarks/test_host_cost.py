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


def test_adapters_cost_the_host_what_a_plan_takes():
    pytest.importorskip("peft")
    from stars_fast.training.plan.passes import ADAPTED_HOST

    for dual in (False, True):
        adapted, plain = (ops_a_layer(dual, False, rank) for rank in (8, None))
        for each, index in (("forward", 0), ("backward", 2)):
            taken = ADAPTED_HOST["dual" if dual else "plain", each]
            # PEFT's own code, which changes from version to version
            assert adapted[index] / plain[index] == pytest.approx(taken, rel=0.1)
