"""A Jacobian penalty for a tiny recursive model, where the double backward was used before.

The model is in the manner of the Tiny Recursive Model (Jolicoeur-Martineau 2025, arXiv:2510.04871):
one small network refines a latent z by the question x and the answer y, then y by z. The block is
one such round on the state [y, z]. Two estimates of ||J||_F^2 / D are compared in one run: ours
carries a tangent forward (||J v||^2), the usual one is a backward pass with a graph of its own.
"""

import statistics
import time

import torch
from torch import Tensor, nn

import stars_fast

WIDTH = 128


class Round(nn.Module):
    """A round: the state [B, S, 2 D], answer and latent side by side, and the question x [B, S, D]
    give the next state."""

    def __init__(self, inner: int = 3) -> None:
        super().__init__()
        self.inner = inner
        self.norm = nn.RMSNorm(WIDTH)
        self.tokens = nn.Linear(9, 9)  # mixes places; S = 9
        self.net = nn.Sequential(nn.Linear(WIDTH, 256), nn.SiLU(), nn.Linear(256, WIDTH))

    def update(self, at: Tensor) -> Tensor:
        at = at + self.tokens(at.transpose(1, 2)).transpose(1, 2)
        return self.norm(at + self.net(at))

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        y, z = state.chunk(2, -1)
        for _ in range(self.inner):
            z = self.update(x + y + z)
        return torch.cat((self.update(y + z), z), -1)


def double_backward(block: Round, state: Tensor, x: Tensor) -> Tensor:
    """||v^T J||^2, the mean over samples, by autograd of autograd."""
    state = state.detach().requires_grad_()
    v = torch.randn_like(state)
    v = v / v.flatten(1).norm(dim=1)[:, None, None]
    (product,) = torch.autograd.grad(block(state, x), state, v, create_graph=True)
    return product.square().sum((1, 2)).mean()


def main(draws: int = 40, batch: int = 128) -> None:
    torch.manual_seed(0)
    block, x = Round(), torch.randn(batch, 9, WIDTH)
    state = torch.zeros(batch, 9, 2 * WIDTH)
    with torch.no_grad():
        for _ in range(4):
            state = block(state, x)
    ways = {
        "double backward": lambda: double_backward(block, state, x),
        "fused_jsrr": lambda: stars_fast.fused_jsrr(block, state, args=(x,)),
    }
    values: dict[str, list[float]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(draws):
        for name, penalty in ways.items():  # in turn, so that a busy machine slows both
            start = time.perf_counter()
            value = penalty()
            value.backward()
            seconds[name].append(time.perf_counter() - start)
            values[name].append(value.item())
    for name in ways:
        mean, error = statistics.mean(values[name]), statistics.stdev(values[name]) / draws**0.5
        median = 1000 * statistics.median(seconds[name])
        print(f"{name}: {mean:.4f} +- {error:.4f}, {median:.1f} ms with its backward")
    print(stars_fast.explain(block, state, args=(x,)))


if __name__ == "__main__":
    main()
