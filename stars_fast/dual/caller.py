"""Who calls: the innermost frame outside of the libraries."""

from __future__ import annotations

import sys
from types import FrameType


def frame_outside(*packages: str) -> FrameType:
    """The innermost frame whose module is of none of these packages, or the outermost of all."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in packages:
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").split(".")[0]


def torch_keeps() -> bool:
    """Whether torch asks for itself, to keep tensors for a backward or a recomputation: it detaches
    them then without making constants of them."""
    name = frame_outside("stars_fast").f_globals.get("__name__")
    return name in ("torch.utils.checkpoint", "torch.autograd.graph")
