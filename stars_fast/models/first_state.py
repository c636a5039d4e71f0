"""A first state of noise: in training by the seeds of the samples, else by the tokens' places."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from stars_fast.base.seeds import derive

_ROWS = 64
"""Places of a block of noise that is drawn at once."""


def placed_noise(positions: Tensor, width: int) -> Tensor:
    """Normal numbers [B or 1, S, D] in fp32 that are a function of the position alone, so that a
    token starts alike with and without a cache, beside pads and in any batch.

    Args:
        positions: [B or 1, S] int64.
        width: D.
    """
    blocks, places = torch.unique(positions // _ROWS, return_inverse=True)
    table = torch.stack([_noise_block(i, width) for i in blocks.tolist()])
    return table.to(positions.device)[places, positions % _ROWS]


@lru_cache(maxsize=1024)
def _noise_block(index: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive(0, "first state", index))
    return torch.randn(_ROWS, width, generator=generator)
