"""The token loss of Ouro, without a tensor of all logits."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast.models.ouro.config import OuroConfig
from stars_fast.models.ouro.exit_loss import exit_weighted_loss
from stars_fast.ops.linear_cross_entropy import linear_cross_entropy

IGNORED = -100


def language_loss(
    config: OuroConfig,
    head: nn.Linear,
    outputs: Any,
    labels: Tensor,
    cu_seqlens: Tensor | None,
    count: Tensor | int | None,
) -> Tensor:
    """Cross-entropy of the next token, from the last turn or weighted by the exit distribution.

    Args:
        outputs: an `OuroModelOutput`; with a trained gate with states and gates.
        labels: [B, S], not shifted.
        count: divides the sum; the number of targets by default.
    """
    targets = next_tokens(labels, cu_seqlens)
    if outputs.real is not None:  # a pad on the left does not foretell the first token
        targets = targets.masked_fill(~outputs.real, IGNORED)
    if config.gate != "trained":
        h = outputs.last_hidden_state
        return linear_cross_entropy(h, head.weight, targets, count=count).loss
    states = outputs.hidden_states[1:]
    weighted = exit_weighted_loss(
        states, outputs.gates, head.weight, targets, beta=config.exit_entropy, count=count
    )
    # After one turn the exit is certain and the gate without effect: it still takes part.
    return weighted.loss + 0.0 * outputs.gates.sum()


def next_tokens(labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """[B, S]: of each position the token that follows it, -100 at the end (of each document)."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if cu_seqlens is None:
        return targets
    ends = cu_seqlens[1:].to(labels.device).long() - 1
    return targets.index_fill(1, ends.clamp_min(0), IGNORED)
