"""Rotary positions of Ouro: cosines and sines from the configuration alone.

The frequencies are no buffer: nothing loads, moves or casts them, so they are exact whatever way
the weights came. Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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


class Rotary:
    """theta_j = rope_theta^(-2j / D), perhaps scaled, and positions to angles.

    Args:
        config: a configuration with `rope_parameters` and `head_dim`; for rope type yarn that of a
            model of transformers.

    Raises:
        ValueError: a rotary type whose frequencies change with the length.
    """

    def __init__(self, config: Any) -> None:
        rope = config.rope_parameters
        self.scale = 1.0
        if rope["rope_type"] in _SCALED:
            # On the CPU by name: models are built on the meta device before their weights come.
            steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
            plain = rope["rope_theta"] ** (-steps / config.head_dim)
            self.frequencies = _SCALED[rope["rope_type"]](plain, rope)
        elif rope["rope_type"] == "yarn":
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            with torch.device("cpu"):
                frequencies, self.scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
            self.frequencies = frequencies.double()
        else:
            raise ValueError(
                "rope_parameters: expected rope_type default, linear, yarn or llama3, "
                f"got {rope['rope_type']!r}"
            )
        self._on: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, S, D] of integer positions [B, S]; fp64 for fp64 states, else
        fp32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        key = positions.device, wide
        frequencies = self._on.get(key)
        if frequencies is None:
            frequencies = self.frequencies.to(*key)
            if type(frequencies) is Tensor:  # not what torch.export traces with
                self._on[key] = frequencies
        with torch.autocast(positions.device.type, enabled=False):
            angles = positions.unsqueeze(-1).to(wide) * frequencies
            angles = torch.cat((angles, angles), -1)
            return angles.cos() * self.scale, angles.sin() * self.scale
