"""Runs that repeat bit for bit on a GPU too.

There some of PyTorch's kernels add in whatever order their threads come: the backward of its
attention above all, and of embeddings and indexing. Our own kernels add in a fixed order: the
gradients of weights are summed over programs one after another, and a design of the attention's
backward that uses atomics (none is the default) is not taken with deterministic algorithms.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""How much memory cuBLAS may work in; with several streams its results depend on it
(https://docs.nvidia.com/cuda/cublas/#results-reproducibility)."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, with `wanted`, PyTorch takes deterministic kernels, and an op that has none is an
    error that names it. Then all is as before.

    Enter it before the first product on a GPU: cuBLAS reads its setting once.
    """
    if not wanted:
        yield
        return
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    strict = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(WORKSPACE)
    try:
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it finds bugs, and takes time
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=lenient)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before  # type: ignore[attr-defined]
        if workspace is None:
            del os.environ[WORKSPACE]
