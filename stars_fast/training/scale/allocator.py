"""PyTorch's CUDA memory in segments that grow."""

import os
import sys

import torch

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the environment that PyTorch reads, the newer first."""


def grow_segments() -> bool:
    """Let PyTorch's CUDA allocator grow its segments, where nobody has set it; whether it was set.

    The turns of a step come in changing numbers and sizes; in segments of fixed size what one step
    leaves free does not fit the next (`expandable_segments` in
    https://docs.pytorch.org/docs/stable/notes/cuda.html). To be called before CUDA is initialised,
    which is when the setting is read. Only Linux has such segments.
    """
    taken = any(name in os.environ for name in SETTINGS) or torch.cuda.is_initialized()
    if taken or not sys.platform.startswith("linux"):
        return False
    os.environ[SETTINGS[0]] = "expandable_segments:True"
    return True
