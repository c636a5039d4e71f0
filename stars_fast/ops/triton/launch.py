"""Launching of row and elementwise kernels: rows of a tensor, tiles, programs.

A row kernel goes through the columns of its rows in turns of BLOCK columns, once for each statistic
and once to write. Up to a limit a row is one turn, WHOLE, for which the compiler merges the loops
and loads each value once. BLOCK is a power of two and the width an argument, so that lengths share
compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

THREAD_ELEMENTS = 8  # 16 bytes of a 16-bit dtype
TILE_ELEMENTS = 1024  # at least, where there are as many
MAX_WARPS = 16
WARPS_PER_PROCESSOR = 16  # of kernels that keep their programs and loop over rows
PREFETCHED = 65536  # bytes of shared memory of a processor for the rows that come next
MAX_REGISTERS = 128  # of a thread of those, so that all their programs run at once


class Rows(NamedTuple):
    """Rows of contiguous elements in memory.

    Attributes:
        data: the tensor whose memory holds them.
        pair: elements from a row of the primal to that of the tangent.
        stride: elements from a row to the next.
    """

    data: Tensor
    pair: int
    stride: int


def element_size(x: Tensor, dual: bool) -> tuple[int, int]:
    """Rows and width of x [2, ..., D] with `dual`, [..., D] without; a scalar is a row of one."""
    if x.dim() == dual:
        return 1, 1
    return x.shape[1 if dual else 0 : -1].numel(), x.shape[-1]


def rows_of(x: Tensor, dual: bool) -> Rows:
    """x as rows, copied only where its leading dimensions have no common stride."""
    count, width = element_size(x, dual)
    if not x.is_contiguous():
        x = x.reshape(2, count, width) if dual else x.reshape(count, width)
        if x.stride(-1) == 1:
            return Rows(x, x.stride(0) if dual else 0, x.stride(-2))
        x = x.contiguous()
    return Rows(x, count * width, width)


def tile(width: int, limit: int) -> dict[str, int]:
    """Tile of a row kernel: ROWS rows of BLOCK columns, whether those are WHOLE rows, the warps."""
    block = triton.next_power_of_2(width)
    if block > limit:
        return _meta(1, limit) | {"WHOLE": False}
    return whole_tile(width) | {"WHOLE": True}


def whole_tile(width: int) -> dict[str, int]:
    """Tile of whole rows, however wide: ROWS rows of BLOCK columns, and the warps."""
    block = triton.next_power_of_2(width)
    return _meta(max(TILE_ELEMENTS // block, 1), block)


def flat_tile(width: int) -> dict[str, int]:
    """Tile of an elementwise kernel: ROWS rows of BLOCK columns, and the warps."""
    block = min(triton.next_power_of_2(width), TILE_ELEMENTS)
    return _meta(TILE_ELEMENTS // block, block)


def _meta(rows: int, block: int) -> dict[str, int]:
    warps = min(max(rows * block // (32 * THREAD_ELEMENTS), 1), MAX_WARPS)
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps}


def in_units(width: int, *views: Rows) -> tuple[int, list[int]]:
    """UNIT, and the width and the pair and stride of each view in units of as many elements: those
    of 16 bytes where all are multiples of that, else 1. For kernels whose widths vary: they take
    the numbers unspecialised, yet the compiler knows what is aligned."""
    found = [width, *(step for view in views for step in (view.pair, view.stride))]
    unit = 16 // views[0].data.element_size()
    if any(step % unit for step in found):
        unit = 1
    return unit, [step // unit for step in found]


def programs(x: Tensor, tiles: int, warps: int) -> int:
    """How many programs share the tiles: as many as the device runs at once."""
    return min(tiles, _processors(x.device) * max(WARPS_PER_PROCESSOR // warps, 1))


def stages(x: Tensor, streams: int, meta: dict[str, int]) -> int:
    """Stages of the loop over a program's tiles: its `streams` of rows are read up to two tiles
    ahead, as far as the shared memory of all programs of a processor reaches."""
    together = max(WARPS_PER_PROCESSOR // meta["num_warps"], 1)
    tile_bytes = streams * meta["ROWS"] * meta["BLOCK"] * x.element_size()
    return 1 + min(PREFETCHED // (together * tile_bytes), 2) if meta["WHOLE"] else 1


@cache
def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2  # Triton's interpreter: few, so that a program has several tiles


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, its kernels launched on the device of its first argument."""

    @wraps(function)
    def run(x: Tensor, *args: object) -> Any:
        with torch.cuda.device_of(x):
            return function(x, *args)

    return run


def check_device(parameter: Tensor, x: Tensor) -> None:
    """Raise RuntimeError if what a kernel reads beside the rows x is on another device: on another
    GPU its address may be one that ends the process."""
    if parameter.get_device() != x.get_device():
        raise RuntimeError(
            f"stars_fast: expected all tensors on {x.device}, where the first is, got one on "
            f"{parameter.device}"
        )


def launch(kernel: Any, programs: int, x: Tensor, /, *args: object, **meta: object) -> None:
    """Run a kernel on x's device; args come after x in the kernel's signature."""
    if programs:
        with torch.cuda.device_of(x):
            kernel[(programs,)](x, *args, enable_fp_fusion=True, **meta)
