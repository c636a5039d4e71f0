"""What the training step asks of a looped model: prelude, turns, head."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from stars_fast.training.step.batches import MicroBatch
from stars_fast.training.step.samples import Samples

Turn = Callable[[Tensor], Tensor]
"""One turn of the shared block on the samples of a micro-batch, h [B, S, D] -> [B, S, D]; a `Dual`
gives a `Dual`."""


class Loop(ABC, nn.Module):
    """A looped model as the step calls it. `model` holds the weights."""

    model: nn.Module

    @abstractmethod
    def prelude(self, tokens: Tensor) -> Tensor:
        """Token ids [B, S] int64 -> h^(0) [B, S, D]."""

    @abstractmethod
    def turn(self, h: Tensor, samples: Samples) -> Turn:
        """The turn for states of the shape, dtype and device of `h`, whose samples these are."""

    @abstractmethod
    def token_loss(self, h: Tensor, batch: MicroBatch, count: int) -> Tensor:
        """Cross entropy in nats of h [B, S, D] after the last turn, summed over the supervised
        places and divided by `count`; a scalar, fp32 at least."""

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
