"""Triton kernels, one file an op. `KERNELS` maps an op's name to its implementation, which has the
signature of its schema in `ops/library.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stars_fast.ops.triton import (
    attention,
    attention_backward,
    elementwise,
    norm,
    rotary,
    sandwich,
    seed,
    softmax,
)
from stars_fast.ops.triton.launch import on_device

KERNELS: dict[str, Callable[..., Any]] = {
    "norm": norm.norm,
    "norm_backward": norm.norm_backward,
    "sandwich": sandwich.sandwich,
    "sandwich_backward": sandwich.sandwich_backward,
    "pointwise": elementwise.pointwise,
    "pointwise_backward": elementwise.pointwise_backward,
    "gated": elementwise.gated,
    "gated_backward": elementwise.gated_backward,
    "softmax": softmax.softmax,
    "softmax_backward": softmax.softmax_backward,
    "rotary": rotary.rotary,
    "row_squares": seed.row_squares,
    "row_squares_backward": seed.row_squares_backward,
    "normal_squares": seed.normal_squares,
    "seed_stack": seed.seed_stack,
    "attention": on_device(attention.attention),
    "attention_backward": on_device(attention_backward.attention_backward),
}
