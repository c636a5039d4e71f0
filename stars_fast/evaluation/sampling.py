"""Sampling whose draws belong to a generation, and not to the batch that it is made in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor


class GumbelNoise(LogitsProcessor):
    """Makes greedy decoding draw from softmax(logits / temperature).

    The argmax of logits / temperature + Gumbel noise is distributed so (the Gumbel-max trick). Each
    row has a generator of its own, so that what it draws depends on its seed and its logits alone:
    a run in other batches, or one that was stopped, makes the same samples on a device of the same
    kind.

    Args:
        seeds: of the rows.
        temperature: above 0.
        device: of the logits.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        """scores [B, V] -> fp64 [B, V]."""
        smallest = torch.finfo(torch.float64).tiny
        noise = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.double() / self.temperature - noise.clamp_min_(smallest).log_()
