"""The token loss of Ouro, without a tensor of all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast.models.ouro.config import OuroConfig
from stars_fast.models.ouro.exit_loss import exit_weighted_loss
from stars_fast.models.plain_linear import is_plain_linear
from stars_fast.ops.linear_cross_entropy import linear_cross_entropy

IGNORED = -100


def language_loss(
    config: OuroConfig, head: nn.Linear, outputs: Any, labels: Tensor, count: Tensor | int | None
) -> Tensor:
    """Cross-entropy of the next token, from the last turn or weighted by the exit distribution.

    Args:
        outputs: an `OuroModelOutput`; with a trained gate with states and gates.
        labels: [B, S], not shifted.
        count: divides the sum; the number of targets by default.
    """
    if labels.shape != outputs.last_hidden_state.shape[:2]:
        raise ValueError(
            f"labels: expected shape {list(outputs.last_hidden_state.shape[:2])}, "
            f"got {list(labels.shape)}"
        )
    targets = next_tokens(labels, outputs.real, outputs.starts)
    plain = is_plain_linear(head) and head.bias is None
    if config.gate != "trained":
        h = outputs.last_hidden_state
        if not plain:
            return _by_calling(head, h, targets, count)
        return linear_cross_entropy(h, head.weight, targets, count=count).loss
    if not plain:
        raise ValueError(
            "gate: 'trained' needs a plain lm_head, without adapter, bias or hook, "
            f"got {type(head).__name__}"
        )
    weighted = exit_weighted_loss(
        outputs.hidden_states[1:], outputs.gates, head.weight, targets,
        beta=config.exit_entropy, count=count,
    )  # fmt: skip
    # After one turn the exit is certain and the gate without effect: it still takes part.
    return weighted.loss + 0.0 * outputs.gates.sum()


def _by_calling(head: nn.Module, h: Tensor, targets: Tensor, count: Tensor | int | None) -> Tensor:
    """The loss through a head that is more than its weight: logits at the targets alone."""
    kept = targets != IGNORED
    logits = head(h[kept])
    wide = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(logits.to(wide), targets[kept], reduction="sum")
    return total / (kept.sum().clamp_min(1) if count is None else count)


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
