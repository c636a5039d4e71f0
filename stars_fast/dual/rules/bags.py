"""embedding_bag, of which torch has no second derivative, taken apart: rows, weights, a sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.dual.rule import rule


@rule("embedding_bag", kind="composed", owners=(F,))
def embedding_bag_rule(
    input: Any,
    weight: Any,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """As F.embedding_bag, for sums and means.

    Args:
        input: [B, N] rows of `weight`, or [n] of bags that begin at `offsets`.
        weight: [V, D].
        per_sample_weights: of the shape of input, for sums.
    """
    if mode not in ("sum", "mean"):
        raise RuntimeError(
            f"stars_fast: embedding_bag with mode {mode!r} of a tensor with a tangent: torch has "
            "no second derivative of it; use embedding, and amax over the bag"
        )
    index, counts = input.reshape(-1), torch.ones_like(input, dtype=torch.bool)
    rows = F.embedding(index, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    if padding_idx is not None:
        counts = input != padding_idx % weight.shape[0]
        rows = torch.where(counts.reshape(-1, 1), rows, 0.0)
    if input.dim() == 2:
        out, sizes = rows.view(*input.shape, -1).sum(1), counts.sum(1)
    else:
        assert offsets is not None
        starts = offsets[:-1] if include_last_offset else offsets
        places = torch.arange(len(index), device=index.device)
        bag = torch.searchsorted(starts.contiguous(), places, right=True) - 1
        out = rows.new_zeros(len(starts), rows.shape[1]).index_add(0, bag, rows)
        sizes = counts.new_zeros(len(starts), dtype=torch.int64).index_add(0, bag, counts.long())
    return out if mode == "sum" else out / sizes.clamp_min(1)[:, None]
