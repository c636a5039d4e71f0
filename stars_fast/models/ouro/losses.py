"""The token loss of Ouro, without a tensor of all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast.models.plain_linear import is_plain_linear
from stars_fast.ops.linear_cross_entropy import linear_cross_entropy

IGNORED = -100


def language_loss(
    head: nn.Linear, outputs: Any, labels: Tensor, count: Tensor | int | None
) -> Tensor:
    """Cross-entropy of the next token, from the state that the logits come from.

    Args:
        outputs: an `OuroModelOutput`.
        labels: [B, S], not shifted.
        count: divides the sum; the number of targets by default.
    """
    if labels.shape != outputs.last_hidden_state.shape[:2]:
        raise ValueError(
            f"labels: expected shape {list(outputs.last_hidden_state.shape[:2])}, "
            f"got {list(labels.shape)}"
        )
    h = outputs.last_hidden_state
    # Of a model over several devices the state is on the last, tokens and labels on the first
    targets = next_tokens(labels, outputs.real, outputs.starts).to(h.device)
    if not is_plain_linear(head) or head.bias is not None:
        return _by_calling(head, h, targets, count)
    count = count.to(h.device) if isinstance(count, Tensor) else count
    return linear_cross_entropy(h, head.weight, targets, count=count).loss


def _by_calling(head: nn.Module, h: Tensor, targets: Tensor, count: Tensor | int | None) -> Tensor:
    """The loss through a head that is more than its weight: logits at the targets alone."""
    kept = targets != IGNORED
    logits = head(h[kept])
    wide = torch.promote_types(logits.dtype, torch.float32)
    aims = targets[kept].to(logits.device)  # of a head that is tied to the embedding, the first
    total = F.cross_entropy(logits.to(wide), aims, reduction="sum")
    count = kept.sum().clamp_min(1) if count is None else count
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def next_tokens(labels: Tensor, real: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """[B, S]: of each position the token that follows it; -100 on pads, which foretell nothing, and
    at the end (of each document).

    Args:
        labels: [B, S] int64.
        real: [B, S] boolean, False on pads.
        starts: [B or 1, S], where the document of each token starts.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if real is not None:
        targets = targets.masked_fill(~real, IGNORED)
    if starts is not None:
        ends = F.pad(starts[:, 1:] != starts[:, :-1], (0, 1), value=True)
        targets = targets.masked_fill(ends, IGNORED)
    return targets
