"""The most that a machine does, a matrix product and a copy; and what it usually computes in."""

from __future__ import annotations

import torch

from benchmarks.timing import interleaved

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the names that options have."""


def usual_dtype(device: str) -> str:
    """The dtype of tensors, where none is asked for."""
    return "bfloat16" if device == "cuda" else "float32"


def usual_precision(device: str) -> str:
    """The trainer's precision, where none is asked for."""
    return "mixed" if device == "cuda" else "float32"


def measured_peaks(device: torch.device | str, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of a large matrix product and bytes/s (read and written) of a large copy, the best of
    several."""
    cuda = torch.device(device).type == "cuda"
    size = 8192 if cuda else (1024 if dtype == torch.float32 else 256)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    # Written once: memory that never was is a single page.
    source = torch.ones(2**30 if cuda else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ways = {"gemm": lambda: a @ b, "copy": lambda: target.copy_(source)}
    times = interleaved(ways, 10, device)
    return {
        "gemm_flops": 2 * size**3 / min(times["gemm"]),
        "copy_bytes": 2 * source.numel() / min(times["copy"]),
    }
