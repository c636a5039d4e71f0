"""A looped model as training, evaluation and analysis call it: prelude, turns, head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast.data.batches import MicroBatch
from stars_fast.tokens import Tokens

Turn = Callable[[Tensor], Tensor]
"""One turn of the shared block on the samples of a micro-batch, h [B, S, D] -> [B, S, D]; a `Dual`
gives a `Dual`."""


class Loop(ABC, nn.Module):
    """A looped model in its parts.

        e = loop.prelude(tokens, samples)
        h, turn = loop.first_state(e, samples), loop.turn(e, samples)

    model: it holds the weights.
    """

    model: nn.Module

    @abstractmethod
    def prelude(self, tokens: Tensor, samples: Tokens) -> Tensor:
        """Token ids [B, S] int64 of these samples -> the prelude's output e [B, S, D]."""

    def first_state(self, e: Tensor, samples: Tokens) -> Tensor:
        """h^(0) [B, S, D], the state before the first turn: e itself in most models."""
        return e

    @abstractmethod
    def turn(self, e: Tensor, samples: Tokens) -> Turn:
        """The turn for samples whose prelude gave `e`, for states of its shape, dtype and
        device."""

    @property
    def injects(self) -> bool:
        """Whether turns read values of e, besides the state."""
        return False

    @abstractmethod
    def logits(self, h: Tensor, samples: Tokens) -> Tensor:
        """h [B, S, D] after the last turn of these samples -> logits [B, S, V]."""

    @abstractmethod
    def token_loss(self, h: Tensor, batch: MicroBatch, count: int) -> Tensor:
        """Cross entropy in nats of h [B, S, D] after the last turn, summed over the supervised
        places and divided by `count`; a scalar, fp32 at least."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids, V."""

    @property
    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The layers of the shared block, to be sharded one by one."""

    @abstractmethod
    def outside_block(self, supervised: float) -> float:
        """The cost of prelude, coda and head in turns, by the weights of their linear maps; the
        head counts for the share `supervised` of the positions, those that have a target."""

    @abstractmethod
    def turn_flops(self, lengths: list[int]) -> float:
        """Floating-point operations of one turn forward, of samples of so many tokens."""


def matrix_weights(*modules: nn.Module) -> int:
    """Weights of the linear maps within."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.dim() >= 2)


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
