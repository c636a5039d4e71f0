"""Tile sizes of the attention kernels, by architecture, kernel and head width.

From compiling them (`tests/ops/triton_kernels/compiled.py`): few spills, in the shared
memory that the architecture has. sm_86 and sm_89 have 99 KB a block, sm_80 163 KB, sm_90 227 KB.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """Rows that a program holds, rows it streams through in one step, warps, pipeline stages, and
    for the forward the slabs of columns that V is loaded in."""

    held: int
    streamed: int
    warps: int
    stages: int
    slabs: int = 1


# Up to this width one kernel, "keys", computes the gradients of k and v; above, where its sums
# outgrow the registers, "keys_v" and "keys_k" do.
JOINT_WIDTH = 64

# By kernel and width: that of the heads, or the next of these.
_SMALL = {
    ("forward", 64): Tile(128, 64, 8, 2),
    ("forward", 128): Tile(128, 16, 8, 2, 2),
    ("forward", 256): Tile(32, 16, 8, 2, 2),
    ("keys", 64): Tile(128, 32, 8, 2),
    ("keys_v", 128): Tile(64, 32, 8, 2),
    ("keys_v", 256): Tile(32, 16, 8, 2),
    ("keys_k", 128): Tile(64, 16, 8, 2),
    ("keys_k", 256): Tile(32, 16, 8, 2),
    ("queries", 64): Tile(128, 32, 8, 2),
    ("queries", 128): Tile(32, 32, 8, 2),
    ("queries", 256): Tile(16, 32, 8, 1),
}
_SM_80 = {
    ("forward", 64): Tile(128, 64, 8, 3),
    ("forward", 128): Tile(128, 32, 8, 3, 2),
    ("forward", 256): Tile(32, 32, 8, 2, 2),
    ("keys", 64): Tile(128, 32, 8, 2),
    ("keys_v", 128): Tile(64, 64, 8, 2),
    ("keys_v", 256): Tile(32, 32, 8, 2),
    ("keys_k", 128): Tile(128, 16, 8, 2),
    ("keys_k", 256): Tile(32, 16, 8, 2),
    ("queries", 64): Tile(128, 32, 8, 2),
    ("queries", 128): Tile(128, 16, 8, 2),
    ("queries", 256): Tile(32, 16, 8, 2),
}
_SM_90 = _SM_80 | {
    ("forward", 128): Tile(128, 64, 8, 2, 2),
    ("keys_v", 128): Tile(128, 32, 8, 2),
    ("keys_k", 128): Tile(128, 32, 8, 2),
    ("keys_k", 256): Tile(32, 32, 8, 2),
    ("queries", 64): Tile(128, 64, 8, 2),
    ("queries", 128): Tile(128, 32, 8, 2),
}
# Kernels that hold keys and add to the gradient of the queries. On sm_90 their products wait for
# each other at every tile that was compiled; less shared memory has no room for 128 wide heads.
_FUSED_SM_80 = {("fused", 64): Tile(128, 32, 8, 2), ("fused_k", 128): Tile(128, 16, 8, 2)}
_16_BITS = {"sm_80": _SM_80 | _FUSED_SM_80, "sm_90": _SM_90}
# Tiles that leave room for two programs a processor of sm_90, so that one can multiply while the
# other waits. Not measured: `benchmarks/tune_attention.py` alone takes them, and tries them first.
TWO_PROGRAMS = {("forward", 128): Tile(64, 32, 4, 2, 2), ("keys_v", 128): Tile(64, 32, 4, 2)}
_32_BITS = {
    ("forward", 64): Tile(32, 32, 4, 2),
    ("forward", 128): Tile(16, 16, 8, 1, 2),
    ("forward", 256): Tile(16, 16, 8, 1),
    ("keys", 64): Tile(32, 32, 8, 2),
    ("keys_v", 128): Tile(16, 16, 4, 1),
    ("keys_v", 256): Tile(16, 16, 8, 1),
    ("keys_k", 128): Tile(16, 16, 4, 1),
    ("keys_k", 256): Tile(16, 16, 8, 1),
    ("queries", 64): Tile(32, 32, 8, 2),
    ("queries", 128): Tile(16, 16, 4, 1),
    ("queries", 256): Tile(16, 16, 8, 1),
}
# Several tiles of unequal sizes in a short sequence, and so small that NumPy adds up every product
# of two rows in one order, as a GPU does whatever the tile.
_INTERPRETED = {
    (kernel, width): Tile(*sizes, 4, 1, 2 if (kernel, width) == ("forward", 128) else 1)
    for kernel, sizes, widths in (
        ("forward", (32, 16), (64, 128, 256)),
        ("keys", (16, 32), (64,)),
        ("keys_v", (16, 32), (128, 256)),
        ("keys_k", (32, 16), (128, 256)),
        ("queries", (16, 32), (64, 128, 256)),
        ("fused", (16, 32), (64,)),
        ("fused_k", (32, 16), (128,)),
    )
    for width in widths
}


@cache
def architecture(device: torch.device) -> str:
    """The name of a device's instruction set, like "sm_90"; "interpreter" for the CPU."""
    if device.type == "cpu":
        return "interpreter"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def table(q: Tensor) -> dict[tuple[str, int], Tile]:
    """The tiles for tensors like q, by kernel and width; changes to it hold."""
    arch = architecture(q.device)
    if arch == "interpreter":
        return _INTERPRETED
    if q.dtype == torch.float32:
        return _32_BITS
    return _16_BITS.get(arch, _SMALL)


def has(kernel: str, q: Tensor) -> bool:
    """Whether a kernel has a tile for tensors like q [..., D]."""
    return (kernel, _width(q)) in table(q)


def pick(kernel: str, q: Tensor) -> Tile:
    """The tile of a kernel for tensors like q [..., D]."""
    return table(q)[kernel, _width(q)]


def _width(q: Tensor) -> int:
    width = next((width for width in (64, 128, 256) if q.shape[-1] <= width), None)
    if width is None:
        raise ValueError(f"attention: Triton kernels take heads up to 256 wide, got {q.shape[-1]}")
    return width
