"""Gradients of two processes held against those of one."""

import torch


def gradients(net):
    """Whole gradients by the names of the bare model."""
    named = [(n.removeprefix("module."), p.grad) for n, p in net.named_parameters()]
    full = {
        n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in named if g is not None
    }
    return {n: g.clone() for n, g in full.items()}


def compare(mine, whole, what):
    assert mine.keys() == whole.keys(), (what, mine.keys() ^ whole.keys())
    for name, expected in whole.items():
        torch.testing.assert_close(
            mine[name], expected, rtol=1e-9, atol=1e-12, msg=f"{what} {name}"
        )
