"""The state before the first turn: noise that a seed and the place of a token give.

    s = std Phi^-1(u),    u uniform between Phi(-3) and Phi(3)

as the public initial states are distributed (`initialize_state` in
recpre/raven_modeling_minimal.py, https://github.com/seal-rg/recurrent-pretraining). u is made of a
hash of seed, position and column, so that a token has the same state whatever stands beside or
after it, whether a cache holds what comes before it, and on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BOUND = 3.0
"""Standard deviations at which the normal is cut off."""

# SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), whose
# constants are written here as signed integers, as torch has them.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)


def noise_state(seed: Tensor | int, positions: Tensor, width: int, std: float) -> Tensor:
    """Truncated-normal noise, [B, S, width] fp64.

    Args:
        seed: [B, 1 or S] int64, or one for all tokens.
        positions: [B or 1, S] int64.
        width: D.
        std: of the normal before it is cut off at 3 of them.
    """
    rows = _hash(torch.as_tensor(seed, device=positions.device) + _STEP * (positions + 1))
    column = torch.arange(1, width + 1, device=positions.device)
    bits = _hash(rows.unsqueeze(-1) + _STEP * column)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    inside = math.erf(BOUND / math.sqrt(2))  # P(|z| <= 3)
    return torch.erfinv((2 * uniform - 1) * inside) * (math.sqrt(2) * std)


def fresh_seeds(rows: int, device: torch.device) -> Tensor:
    """[rows, 1] int64, drawn from torch's generator of the device, as dropout is."""
    return torch.randint(2**62, (rows, 1), device=device)


def _hash(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, on int64 that wrap around."""
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by, of x without its sign."""
    return (x >> by) & (2 ** (64 - by) - 1)
