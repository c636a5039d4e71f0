"""Kernels of Triton are interpreted where there is no GPU: to be said before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
