"""A looped model as training, evaluation and analysis call it: prelude, turns, head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast.data.batches import MicroBatch
from stars_fast.models.plain_linear import is_plain_linear
from stars_fast.ops.linear_cross_entropy import linear_cross_entropy
from stars_fast.tokens import Tokens

Turn = Callable[[Tensor], Tensor]
"""One turn of the shared block on the samples of a micro-batch, h [B, S, D] -> [B, S, D]; a `Dual`
gives a `Dual`."""


class Start(NamedTuple):
    """Before the first turn.

    state: h^(0) [B, S, D].
    inputs: [B, S, D], what every turn takes in besides the state; None where that is nothing.
    """

    state: Tensor
    inputs: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Start:
        """The same in another dtype."""
        return Start(self.state.to(dtype), None if self.inputs is None else self.inputs.to(dtype))


class Loop(ABC, nn.Module):
    """A looped model in its parts.

    model: it holds the weights.
    """

    model: nn.Module

    @abstractmethod
    def prelude(self, tokens: Tensor) -> Tensor:
        """Token ids [B, S] int64 -> [B, S, D], what comes before the turns."""

    def begin(self, tokens: Tensor, samples: Tokens, seeds: Sequence[int] | None = None) -> Start:
        """Token ids [B, S] int64, whose samples these are -> the state before the first turn, by
        default the prelude's output, and what every turn takes in besides it.

        In training `seeds` are those of the samples' noise, where the first state is noise.
        """
        return Start(self.prelude(tokens))

    @abstractmethod
    def turn(self, h: Tensor, samples: Tokens, inputs: Tensor | None = None) -> Turn:
        """The turn for states of the shape, dtype and device of `h`, whose samples these are.

        `inputs` are those of `begin`, of the same samples.
        """

    @abstractmethod
    def logits(self, h: Tensor) -> Tensor:
        """h [B, S, D] after the last turn -> logits [B, S, V]."""

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

    @property
    def turn_modules(self) -> list[nn.Module]:
        """All modules that a turn runs: the layers, and what takes in an injection."""
        return self.layers

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


def head_loss(
    head: nn.Module | Callable[[Tensor], Tensor], h: Tensor, batch: MicroBatch, count: int
) -> Tensor:
    """`Loop.token_loss` of the coda's output h [B, S, D]: without a tensor of all logits where the
    head is a linear map without bias and nothing else, by calling it where it is more."""
    if not is_plain_linear(head) or head.bias is not None:
        return token_loss(head, h, batch.positions, batch.labels) / count
    rows = h.flatten(0, 1).index_select(0, batch.positions)
    found = linear_cross_entropy(rows, head.weight, batch.labels, ignore_index=None, count=count)
    return found.loss
