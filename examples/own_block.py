"""Your own block in your own loop: one convolution, repeated, learns the parity of a string.

Each turn carries information one place further, so a string of 8 needs 8 turns. The penalty asks
that a turn shrinks what disturbs the state: the spectral radius of its Jacobian falls.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stars_fast

WIDTH, LENGTH = 32, 8


class Turn(nn.Module):
    """A turn: h [B, S, D] and the input x [B, S, D] give the next h."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 2)
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        left = F.pad((h + x).transpose(1, 2), (1, 0))  # a token sees itself and the one before
        h = h + self.mix(left).transpose(1, 2)
        return self.norm(h + self.down(F.silu(self.up(h))))


def bits(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Strings [B, S] of zeros and ones, and the parity so far at each place."""
    string = torch.randint(2, (count, length))
    return string, string.cumsum(1) % 2


def train(weight: float, steps: int) -> tuple[nn.Embedding, Turn, nn.Linear]:
    """Prelude, block and head, trained with the penalty's weight."""
    torch.manual_seed(0)
    prelude, block, head = nn.Embedding(2, WIDTH), Turn(), nn.Linear(WIDTH, 2)
    model = nn.ModuleList([prelude, block, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        string, parity = bits(32, LENGTH)
        x = prelude(string)
        h = torch.zeros_like(x)
        for _ in range(int(torch.randint(LENGTH, LENGTH + 4, ()))):  # turns, drawn for each batch
            h = block(h, x)
        loss = F.cross_entropy(head(h).flatten(0, 1), parity.flatten())
        if weight and step > steps // 2:  # once the task is learned
            penalty = stars_fast.fused_jsrr(block, h, args=(x,))
            loss = (1 - weight) * loss + weight * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return prelude, block, head


def main(steps: int = 300) -> None:
    for weight in (0.0, 0.1):
        prelude, block, head = train(weight, steps)
        string, parity = bits(256, LENGTH)
        with torch.no_grad():
            x = prelude(string)
            h, right = torch.zeros_like(x), {}
            for turn in range(1, 129):
                h = block(h, x)
                right[turn] = (head(h).argmax(-1) == parity).all(1).float().mean().item()
            rho = stars_fast.spectral_radius(block, h[:1], args=(x[:1],), method="arnoldi")
        shown = ", ".join(f"{turn}: {100 * right[turn]:.0f} %" for turn in (4, 8, 16, 32, 128))
        print(f"penalty {weight}: right after turns {shown}; spectral radius {rho.item():.2f}")


if __name__ == "__main__":
    main()
