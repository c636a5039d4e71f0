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
    config: OuroConfig, head: nn.Linear, outputs: Any, labels: Tensor, count: Tensor | int | None
) -> Tensor:
    """Cross-entropy of the next token, from the last turn or weighted by the exit distribution.

    Args:
        outputs: an `OuroModelOutput`; with a trained gate with states and gates.
        labels: [B, S], not shifted.
        count: divides the sum; the number of targets by default.
    """
    targets = next_tokens(labels, outputs.real, outputs.starts)
    if config.gate != "trained":
        h = outputs.last_hidden_state
        return linear_cross_entropy(h, head.weight, targets, count=count).loss
    states = outputs.hidden_states[1:]
    weighted = exit_weighted_loss(
        states, outputs.gates, head.weight, targets, beta=config.exit_entropy, count=count
    )
    # After one turn the exit is certain and the gate without effect: it still takes part.
    return weighted.loss + 0.0 * outputs.gates.sum()


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
