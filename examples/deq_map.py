"""A Jacobian penalty at the fixed point of a DEQ-like map, where double backward was used before.

A deep equilibrium model answers by z* = f(z*, x). Regularising ||J||_F^2 at z* (Bai et al. 2021,
arXiv:2106.14342) keeps its solver short; `fused_jsrr` is that penalty, by a tangent. The gradient
here is the one-step one: the solver runs without a graph, then f once with it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stars_fast

WIDTH = 64


class Map(nn.Module):
    """f: the state z [B, D] and the input x [B, D] give the next state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.outer(F.relu(self.inner(z + x)))) + x)


@torch.no_grad()
def solve(f: Map, x: Tensor, tol: float = 1e-4, most: int = 200) -> tuple[Tensor, int]:
    """The fixed point by iteration, and the iterations taken: `most` where it was not reached."""
    z = torch.zeros_like(x)
    for count in range(1, most + 1):
        last, z = z, f(z, x)
        if (z - last).norm() <= tol * z.norm():
            return z, count
    return z, most


def train(weight: float, steps: int) -> tuple[float, int, float]:
    """Last loss, iterations of the solver and spectral radius, after training."""
    torch.manual_seed(0)
    f, read, teacher = Map(), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
    optimizer = torch.optim.Adam([*f.parameters(), *read.parameters()], lr=3e-3)
    for _ in range(steps):
        x = torch.randn(128, WIDTH)
        z, _ = solve(f, x, most=30)
        label = teacher(torch.sin(2 * x)).argmax(-1)
        token_loss = F.cross_entropy(read(f(z, x)), label)  # the one-step gradient
        loss = token_loss
        if weight:
            loss = loss + weight * stars_fast.fused_jsrr(f, z, args=(x,))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    z, count = solve(f, x)
    radius = stars_fast.spectral_radius(f, z[:4], args=(x[:4],), method="arnoldi").mean()
    return token_loss.item(), count, radius.item()


def main(steps: int = 300) -> None:
    for weight in (0.0, 1.0):
        loss, count, radius = train(weight, steps)
        found = f"loss {loss:.3f}, {count} iterations to 1e-4, spectral radius {radius:.2f}"
        print(f"penalty {weight}: {found}")


if __name__ == "__main__":
    main()
