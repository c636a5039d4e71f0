"""Modules that a looped decoder has besides those of its decoder."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from stars_fast.base.seeds import derive

_ROWS = 64
"""Places of a block of noise that is drawn at once."""


class Adapter(nn.Module):
    """A linear map of the state and the prelude's output, [B, S, D] each, to what a turn reads.

    It starts as the state alone where the first state is the prelude's output, else as the
    prelude's output alone: one turn then is what it would be without an adapter.

    Args:
        width: D.
        keeps_state: whether it starts as the state.
    """

    def __init__(self, width: int, keeps_state: bool) -> None:
        super().__init__()
        self.keeps_state = keeps_state
        self.linear = nn.Linear(2 * width, width, bias=False)

    def start(self) -> Tensor:
        """The weight [D, 2 D] that it starts with."""
        width = self.linear.out_features
        whole, nothing = torch.eye(width), torch.zeros(width, width)
        return torch.cat((whole, nothing) if self.keeps_state else (nothing, whole), 1)

    def forward(self, h: Tensor, inputs: Tensor) -> Tensor:
        return self.linear(torch.cat((h, inputs), -1))


class LearnedState(nn.Module):
    """One vector [D] that every token starts from; it starts as zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, S, D], of the shape, dtype and device of `inputs`."""
        return self.vector.to(inputs.dtype).expand(inputs.shape)


def placed_noise(positions: Tensor, width: int) -> Tensor:
    """Normal numbers [B or 1, S, D] in fp32 that are a function of the position alone, so that a
    token starts alike with and without a cache, beside pads and in any batch.

    Args:
        positions: [B or 1, S] int64.
        width: D.
    """
    blocks = int(positions.max()) // _ROWS + 1
    table = torch.cat([_noise_block(i, width) for i in range(blocks)])
    return table.to(positions.device)[positions]


@lru_cache(maxsize=1024)
def _noise_block(index: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive(0, "first state", index))
    return torch.randn(_ROWS, width, generator=generator)
