"""Gradients that stay where they are. Two processes: `run/test_runs.py`, case double-graphs."""

import torch
from torch import nn

from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.flat_gradients import FlatGradients

ALONE = World(0, 1, torch.device("cpu"))


def test_gradients_are_views_of_a_few_tensors_and_stay_there():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, dtype=torch.float64), nn.Linear(2, 5))
    net[2].bias.requires_grad_(False)
    gradients = FlatGradients(net, limit=4 * 16)
    wanted = [p for p in net.parameters() if p.requires_grad]
    assert sum(flat.numel() for flat in gradients.flat) == sum(p.numel() for p in wanted)
    # 12 + 4 fit, and 10 begin another; fp64 has its own: 8, then 2
    assert sorted(flat.numel() for flat in gradients.flat) == [2, 8, 10, 16]
    assert net[2].bias.grad is None
    places = [p.grad.data_ptr() for p in wanted]
    net[0](torch.ones(3)).sum().backward()
    assert all(p.grad.any() for p in net[0].parameters())
    gradients.average(ALONE)
    for p in wanted:
        p.grad = None if p.dim() == 1 else p.grad  # as an optimiser does that drops them
    gradients.zero()
    assert [p.grad.data_ptr() for p in wanted] == places
    assert not any(flat.any() for flat in gradients.flat)
