import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """New tensors are full of NaN, outputs and scratch of every backend included: an entry that a
    kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
