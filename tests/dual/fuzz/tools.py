"""What random programs call beside torch."""

import operator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["F", "checkpoint", "held", "hooked", "lstm", "nn", "np", "on_cpu", "operator"]
__all__ += ["ramp", "torch", "twice"]


def ramp(x):
    """Distinct numbers of x's shape."""
    return torch.arange(1.0, x.numel() + 1, dtype=torch.float64).view(x.shape)


def held(x):
    """What finite differences hold (`programs.Held` goes in its place)."""
    return x


def twice(x):
    return checkpoint(lambda x: x.sin().mul_(2), x, use_reentrant=False)


def on_cpu(f, *args):
    """f with what it saves packed away; torch does not notice later writes to that, so that copies
    go in and come out."""
    with torch.autograd.graph.save_on_cpu():
        return f(*(x.clone() for x in args)).clone()


def hooked(x):
    module = nn.Tanh()
    module.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    return module(x)


def lstm(x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.LSTM(x.shape[-1], 2, batch_first=True, dtype=torch.float64)(x)[0]
