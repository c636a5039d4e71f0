"""Loads and stores of pairs: tensors [2, ...] with DUAL, ordinary ones without.

`pair` is the distance in elements from the primal to the tangent.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_pair(x, pair, offsets, mask, DUAL: tl.constexpr):
    """Primal and tangent in fp32, 0 outside the mask; without DUAL the one value for both. Where
    that stands for a tangent it reaches no result."""
    primal = tl.load(x + offsets, mask, other=0.0).to(tl.float32)
    tangent = tl.load(x + pair + offsets, mask, other=0.0).to(tl.float32) if DUAL else primal
    return primal, tangent


@triton.jit
def store(x, pair, offsets, mask, primal, tangent, DUAL: tl.constexpr):
    """Write a result."""
    tl.store(x + offsets, primal.to(x.dtype.element_ty), mask)
    if DUAL:
        tl.store(x + pair + offsets, tangent.to(x.dtype.element_ty), mask)


@triton.jit
def store_cotangents(x, pair, offsets, mask, x_bar, xd_bar, DUAL: tl.constexpr):
    """Write cotangents. Without DUAL the gradient is xd_bar: see `formulas.py`."""
    if DUAL:
        tl.store(x + offsets, x_bar.to(x.dtype.element_ty), mask)
        tl.store(x + pair + offsets, xd_bar.to(x.dtype.element_ty), mask)
    else:
        tl.store(x + offsets, xd_bar.to(x.dtype.element_ty), mask)


@triton.jit
def turns(width, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """How many turns of BLOCK columns a row takes."""
    if WHOLE:
        return 1
    return tl.cdiv(width, BLOCK)


@triton.jit
def columns(turn, width, BLOCK: tl.constexpr):
    """The columns [1, BLOCK] of a turn, and which of them exist."""
    at = turn * BLOCK + tl.arange(0, BLOCK)[None, :]
    return at, at < width
