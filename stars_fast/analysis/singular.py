"""The singular values of a looped block's Jacobian, through their moments: how large they are, and
how many of them matter.

    mean_square   ||J||_F^2 / D, what the penalty with one power step estimates
    r4            (sum s^2)^2 / sum s^4, the number of singular values that carry it

One random direction estimates the penalty of a sample with a relative variance of at most 2 / r4,
so one is enough where r4 is large. Both are estimated from z ~ N(0, I) by Hutchinson's method:
E||J z||^2 = sum s^2 and E||J^T J z||^2 = sum s^4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stars_fast.dual.repeatable import repeatable
from stars_fast.jsrr import fused_jvp
from stars_fast.ops.sample_norms import sample_norms


class SingularMoments(NamedTuple):
    """mean_square [B]: mean squared singular value. r4 [B]: (sum s^2)^2 / sum s^4, from 1 to D."""

    mean_square: Tensor
    r4: Tensor


def singular_moments(
    block: Callable[..., Any],
    h: Tensor,
    *,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    mask: Tensor | None = None,
    probes: int = 64,
    generator: torch.Generator | None = None,
) -> SingularMoments:
    """Moments of the singular values of the block's Jacobian at each sample of `h`, no gradient.

    A block in training mode is held still: all products are with the dropout masks and buffers of
    one forward, and both are afterwards as after one.

    Args:
        block: any module or callable `h -> h'` that keeps the shape and treats the rows of the
            batch independently.
        h: the state, [B, ..., D] floating point.
        args, kwargs: further arguments of `block`.
        mask: [B, S] for h [B, S, D], True for real tokens: the Jacobian is restricted to them.
        probes: random directions; the relative error falls as their root.
        generator: of the directions.

    Returns:
        Two tensors [B] in fp32 (fp64 for fp64 input); 0 for samples without a real token, and r4 is
        0 where the Jacobian vanishes.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named.
    """
    if not isinstance(h, Tensor) or not h.is_floating_point():
        raise TypeError("h: expected a floating-point tensor")
    if probes < 1:
        raise ValueError(f"probes: expected at least 1, got {probes!r}")
    rows, kwargs, block = sample_norms(h, mask), kwargs or {}, repeatable(block)
    squares = torch.zeros_like(rows.sizes, dtype=torch.float64)
    fourths = torch.zeros_like(squares)
    for _ in range(probes):
        z = torch.randn(h.shape, generator=generator, device=h.device, dtype=rows.dtype)
        z = z if rows.valid is None else z * rows.valid
        x = h.detach().requires_grad_()
        with torch.enable_grad():
            out, jz = fused_jvp(block, x, z.to(h.dtype), args=args, kwargs=kwargs)
            jz = jz.detach() if rows.valid is None else jz.detach() * rows.valid.to(h.dtype)
            (back,) = torch.autograd.grad(out, x, jz)
        back = back if rows.valid is None else back * rows.valid
        squares += jz.double().square().flatten(1).sum(1)
        fourths += back.double().square().flatten(1).sum(1)
    squares, fourths = squares / probes, fourths / probes
    mean_square = squares / rows.sizes.clamp_min(1.0)
    r4 = torch.where(fourths > 0, squares.square() / torch.where(fourths > 0, fourths, 1.0), 0.0)
    return SingularMoments(mean_square.to(rows.dtype), r4.to(rows.dtype))
