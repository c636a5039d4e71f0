"""Rotary position embedding: linear, so the same on primal and tangent.

With x = (x1, x2) the two halves of a head and c, s the cosines and sines of all its entries:
    y1 = x1 c1 - x2 s1        y2 = x2 c2 + x1 s2
    x1_bar = y1_bar c1 + y2_bar s2        x2_bar = y2_bar c2 - y1_bar s1
The convention is that of Llama and Ouro (`rotate_half`), Su et al. 2021 up to the order of entries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.arguments import check_stack
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.library import implementation, plain
from stars_fast.ops.precision import widen


@plain("rotary")
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, transpose: bool) -> Tensor:
    x1, x2 = widen(x.transpose(2, 3)).chunk(2, -1)  # [N, B, S, H, D / 2]
    c1, c2 = widen(cos).unsqueeze(2).chunk(2, -1)  # [B or 1, S, 1, D / 2]
    s1, s2 = widen(sin).unsqueeze(2).chunk(2, -1)
    if transpose:
        halves = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        halves = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    return torch.cat(halves, -1).to(x.dtype).contiguous().transpose(2, 3)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return implementation("rotary", x)(x, cos, sin, False).detach()  # no view

    @staticmethod
    @first_derivative("rotary")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return implementation("rotary", grad)(grad, cos, sin, True), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their positions.

    Args:
        x: [2, B, H, S, D] (a stack) or [B, H, S, D], D even.
        cos, sin: [B, S, D] or [1, S, D]; they get no gradient.

    Returns:
        x's shape and dtype, in the memory order [.., S, H, D]. Computed in fp32 for 16-bit inputs.

    Raises:
        ValueError: the shapes do not fit together.
    """
    if x.dim() not in (4, 5):
        raise ValueError(f"rotary: x: expected [.., B, H, S, D], got {list(x.shape)}")
    check_stack("rotary", "x", x, x.dim() == 5)
    batch, _, length, width = x.shape[-4:]
    fits = cos.shape == sin.shape and cos.dim() == 3 and cos.shape[0] in (1, batch)
    if not fits or cos.shape[1:] != (length, width) or width % 2:
        raise ValueError(
            "rotary: expected x [.., B, H, S, D] with D even, cos and sin [B or 1, S, D], "
            f"got {list(x.shape)}, {list(cos.shape)}, {list(sin.shape)}"
        )
    if x.dim() == 4:
        return _Rotary.apply(x.unsqueeze(0), cos, sin).squeeze(0)
    return _Rotary.apply(x, cos, sin)
