"""The captured dual turn: equal to the eager one on a GPU, a clear error elsewhere."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stars_fast import GraphedBlock, fused_jsrr


def test_it_says_what_it_needs():
    with pytest.raises(ValueError, match="h: expected a tensor on a CUDA device, got cpu"):
        GraphedBlock(nn.Linear(4, 4), torch.randn(2, 3, 4))
    with pytest.raises(TypeError, match="block: expected a module, got function"):
        GraphedBlock(lambda h: h, torch.randn(2, 3, 4))


def test_a_device_on_which_torch_captures_nothing_is_refused(monkeypatch):
    one = torch.device("cuda", 1)
    h = SimpleNamespace(is_cuda=True, device=one)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"h: expected .* current CUDA device cuda:0, got cuda:1"):
        GraphedBlock(nn.Linear(4, 4), h)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    elsewhere = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", elsewhere)
    with pytest.raises(ValueError, match=r"h: expected a tensor on cuda:0, .* got cuda:1"):
        GraphedBlock(nn.Linear(4, 4), h)


@pytest.mark.gpu
def test_loss_and_gradients_equal_those_of_the_eager_pass():
    from stars_fast.models.gpt import GPTBlock
    from stars_fast.models.looped import LoopedConfig

    block = GPTBlock(LoopedConfig(8, 16, d_model=64, n_heads=2, d_ff=128)).cuda()
    h, v = (torch.randn(2, 16, 64, device="cuda") for _ in range(2))
    eager = fused_jsrr(block, h, v=v)
    expected = torch.autograd.grad(eager, list(block.parameters()))
    graphed = GraphedBlock(block, h)
    for _ in range(2):
        loss = fused_jsrr(graphed, h, v=v)
        found = torch.autograd.grad(loss, list(block.parameters()))
        torch.testing.assert_close(loss, eager)
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="captured for"):
        fused_jsrr(graphed, h[:1], v=v[:1])
