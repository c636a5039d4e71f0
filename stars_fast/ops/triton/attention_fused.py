"""Backward of the dual attention in which kernels that hold keys add to the queries' gradient.

Heads up to 64 wide take one kernel and 15 products a tile, none of them twice. Heads up to 128 wide
take 18: the gradients of the values in a kernel of their own, which computes S and S_dot again. All
four sums of a block of keys fit the registers only with 64 keys, on which eight warps compute S and
E twice (21 products), or with 16 queries a step, which add twice as often.

Programs of one head add to a query in whatever order they come, so the last bits change from run to
run. Memory for the time of the call: 4 bytes for each entry of q's stack, in fp32 whatever its
dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stars_fast.ops.triton.attention_parts import Backward
from stars_fast.ops.triton.attention_split import launch_keys
from stars_fast.ops.triton.tiles import JOINT_WIDTH, has, pick


def _kernels(q: Tensor) -> tuple[str, ...]:
    return ("fused",) if q.shape[-1] <= JOINT_WIDTH else ("keys_v", "fused_k")


def takes(q: Tensor) -> bool:
    """Whether there are tiles for tensors like q [2, B, H, Sq, D]."""
    return has(_kernels(q)[-1], q)


def fused(given: Backward, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> None:
    """Fills the gradients, [2, B, S, heads, D] in q's dtype."""
    _, batch, heads, length, width = given.q.shape
    kernels = _kernels(given.q)
    # Rows past the last take the zeros of a last block of queries.
    rows = length + pick(kernels[-1], given.q).streamed
    q_sums = torch.zeros(
        2, batch, heads, rows, width, dtype=torch.float32, device=given.q.device
    )  # fmt: skip
    for kernel in kernels:
        launch_keys(kernel, given, k_grad, v_grad, q_sums)
    torch.mul(q_sums[:, :, :, :length].transpose(2, 3), given.scale, out=q_grad)
