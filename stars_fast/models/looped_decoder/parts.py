"""Modules that a looped decoder has besides those of its decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LearnedState(nn.Module):
    """One vector [D] that every token starts from; it starts as zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, S, D], of the shape, dtype and device of `inputs`."""
        return self.vector.to(inputs.dtype).expand(inputs.shape)
