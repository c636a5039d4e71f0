"""A small model with all that a checkpoint has to care for, and what a run of it continues from."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Net(nn.Module):
    """Tied and frozen parameters, buffers, a parameter that gets no gradient, sizes that two
    processes can't share out evenly."""

    def __init__(self, width=5, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, width)
        self.body = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gate = nn.Linear(width, 1)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, tokens):
        hidden = self.norm(self.body(self.embed(tokens)))
        return self.head(self.frozen(hidden * self.gate(hidden)))


def adamw(net):
    """In two groups, as the trainer makes them."""
    params = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.03, fused=True)


def advance(net, optimizer, first, last):
    """Steps `first` to `last` - 1; what happens in one is a function of its number."""
    for step in range(first, last):
        torch.manual_seed(100 + step)
        for group in optimizer.param_groups:
            group["lr"] = 0.03 / (step + 1)
        net(torch.randint(7, (6,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(net, optimizer):
    """All that a run continues from, whole and as copies: tensors by name, settings by group."""
    values = dict(net.state_dict())
    for name, p in net.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            values[f"{name}.{key}"] = value
    whole = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in values.items()
    }
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return whole, groups


def assert_same(mine, expected):
    """Bit for bit."""
    assert mine[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert mine[0][name].dtype == value.dtype, name
        assert torch.equal(mine[0][name], value), name
    assert mine[1] == expected[1]
