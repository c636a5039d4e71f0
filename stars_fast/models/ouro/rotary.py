"""Rotary positions of Ouro: cosines and sines from the configuration alone.

The frequencies are no buffer: nothing loads, moves or casts them, so they are exact whatever way
the weights came. Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stars_fast.models.ouro.config import OuroConfig


class Rotary:
    """theta_j = rope_theta^(-2j / D), and positions to angles.

    Raises:
        ValueError: a rotary type whose frequencies change with the length.
    """

    def __init__(self, config: OuroConfig) -> None:
        rope = config.rope_parameters
        self.scale = 1.0
        if rope["rope_type"] == "default":
            # On the CPU by name: models are built on the meta device before their weights come.
            steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
            self.frequencies = rope["rope_theta"] ** (-steps / config.head_dim)
        elif rope["rope_type"] in ("linear", "yarn", "llama3"):
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
