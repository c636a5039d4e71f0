"""The token loss of a head that is called, and the step between adjacent states."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.rows import Rows


def token_loss(
    head: Callable[[Tensor], Tensor], h: Tensor, positions: Tensor, labels: Tensor
) -> Tensor:
    """Summed cross entropy in nats over the supervised positions, a scalar; logits only there.

    h [B, S, D] is the coda's output, `positions` [N] int64 the supervised places in h flattened
    to [B * S, D], `labels` [N] int64 the token to predict at each.
    """
    logits = head(h.flatten(0, 1).index_select(0, positions))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="sum")


def adjacent_l2(
    states: Sequence[Tensor], mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Mean of (h^(t+1) - h^(t))^2 over adjacent states, samples, real tokens and width, a scalar.

    `states` are two or more tensors [B, S, D]; `mask` [B, S] is True at real tokens, or
    `cu_seqlens` [n + 1] bounds the documents of one row. Each sample counts alike, whatever its
    length.
    """
    rows = Rows.of(states[0], mask, cu_seqlens)
    steps = [rows.mean_square(after - before, "sample") for before, after in pairwise(states)]
    return torch.stack(steps).mean()
