"""Rotary positions of Huginn and of retrofitted decoders, from the configuration alone, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stars_fast.models.huginn.config import HuginnConfig
from stars_fast.models.ouro.rotary import Rotary


class HuginnRotary(Rotary):
    """theta_j = base^(-2j / D), base and scaling those of the configuration's layout.

    Raises:
        ValueError: a rotary type other than default, linear and llama3.
    """

    def __init__(self, config: HuginnConfig) -> None:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
        if config.layer_layout in ("llama", "olmo2"):
            rope = config.rope_parameters
        if rope["rope_type"] not in _SCALED:
            raise ValueError(
                f"rope_scaling: expected rope_type one of {', '.join(_SCALED)}, got "
                f"{rope['rope_type']!r}"
            )
        # On the CPU by name: models are built on the meta device before their weights come.
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
        plain = rope["rope_theta"] ** (-steps / config.head_dim)
        self.frequencies = _SCALED[rope["rope_type"]](plain, rope)
        self.scale = 1.0
        self._on = {}


def _llama3(theta: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: waves that turn less than `low_freq_factor` times in the length of the
    first training are stretched by `factor`, those of more than `high_freq_factor` turns are not,
    those between are blended linearly (as transformers' rope type llama3)."""
    turns = rope["original_max_position_embeddings"] * theta / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * theta + (1 - kept) * theta / rope["factor"]


_SCALED: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]] = {
    "default": lambda theta, rope: theta,
    "linear": lambda theta, rope: theta / rope["factor"],
    "llama3": _llama3,
}
"""Rotary type -> the frequencies [D / 2] fp64, from the plain ones and the settings."""
