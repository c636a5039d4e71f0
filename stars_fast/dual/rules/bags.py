"""embedding_bag, of which torch has no second derivative, taken apart: rows, weights, a sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.dual.rule import rule
from stars_fast.dual.tensor import Dual, primal_of


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
    """As F.embedding_bag, for sums and means. What torch refuses it refuses here.

    Args:
        input: [B, N] rows of `weight`, or [n] of bags that begin at `offsets`.
        weight: [V, D].
        per_sample_weights: of the shape of input, for sums.
    """
    if type(input) is Dual and not weight.is_floating_point():
        input, weight = weight, input  # an order of long ago, which torch takes with a warning
    table = primal_of(weight)
    column = table[:, :1] if table.dim() == 2 else table
    options = mode, False, primal_of(per_sample_weights), include_last_offset, padding_idx
    with torch.no_grad():
        F.embedding_bag(primal_of(input), column, offsets, None, norm_type, False, *options)
    if mode not in ("sum", "mean"):
        raise RuntimeError(
            f"stars_fast: embedding_bag with mode {mode!r} of a tensor with a tangent: torch has "
            "no second derivative of it; use embedding, and amax over the bag"
        )
    index = input.reshape(-1)
    sparse = sparse and type(weight) is not Dual
    rows = F.embedding(index, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    scales = None if per_sample_weights is None else per_sample_weights.reshape(-1, 1)
    counts = torch.ones_like(index)
    if padding_idx is not None:
        kept = index != padding_idx % weight.shape[0]
        counts = counts * kept
        rows = torch.where(kept[:, None], rows, 0.0)
        scales = None if scales is None else torch.where(kept[:, None], scales, 0.0)
    dtype, wide = rows.dtype, torch.promote_types(rows.dtype, torch.float32)
    rows = rows.to(wide)  # sums are in fp32 at least, as torch's
    rows = rows if scales is None else rows * scales.to(wide)
    bags = _Bags(input, offsets, include_last_offset)
    out = bags.sum(rows)
    out = out if mode == "sum" else out / bags.sum(counts[:, None]).clamp_min(1)
    return out.to(dtype)


class _Bags:
    """Which rows, one for each index, are of one bag; with the arguments of F.embedding_bag."""

    def __init__(self, input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> None:
        self.shape, self.offsets = input.shape, offsets
        if offsets is not None:
            starts = offsets[:-1] if include_last_offset else offsets
            places = torch.arange(len(input), device=input.device)
            self.count = len(starts)
            self.bag = torch.searchsorted(starts.contiguous(), places, right=True) - 1

    def sum(self, rows: Any) -> Any:
        """The sums of rows [n, D] over each bag, [B, D]."""
        if self.offsets is None:
            return rows.view(*self.shape, rows.shape[1]).sum(1)
        return rows.new_zeros(self.count, rows.shape[1]).index_add(0, self.bag, rows)
