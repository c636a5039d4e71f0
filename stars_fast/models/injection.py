"""Input injection: what a turn takes in besides the state, the prelude's output e.

    none      Phi(h) = block(h)
    add       Phi(h) = block(h + e)
    adapter   Phi(h) = block(W [h; e])

Without it the tokens reach a deep state through the first state alone, so that a fixed point which
attracts from everywhere can't depend on them; with it every turn reads them again ("recall", Bansal
et al. 2022, arXiv 2202.05826; the adapter is that of Huginn, arXiv 2502.05171; on fixed points
without recall see arXiv 2604.15259).

Shapes: B batch, S tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INJECTIONS = ("none", "add", "adapter")


class Adapter(nn.Module):
    """A linear map of the state and the prelude's output, [B, S, D] each, to what a turn reads.

    It starts as the state alone where the first state is the prelude's output, else as the
    prelude's output alone: one turn then is what it would be without an adapter.

    Args:
        width: D.
        keeps_state: whether it starts as the state.
    """

    def __init__(self, width: int, keeps_state: bool) -> None:
        super().__init__()
        self.keeps_state = keeps_state
        self.linear = nn.Linear(2 * width, width, bias=False)

    def start(self) -> Tensor:
        """The weight [D, 2 D] that it starts with."""
        width = self.linear.out_features
        whole, nothing = torch.eye(width), torch.zeros(width, width)
        return torch.cat((whole, nothing) if self.keeps_state else (nothing, whole), 1)

    def forward(self, h: Tensor, inputs: Tensor) -> Tensor:
        return self.linear(torch.cat((h, inputs), -1))


class Injected(nn.Module):
    """The first layer of a turn with an injection, h [B, S, D] -> [B, S, D].

    Args:
        adapter: of the model; None to add.
        inputs: [B, S, D], of the samples of this turn.
    """

    def __init__(self, adapter: Adapter | None, inputs: Tensor) -> None:
        super().__init__()
        self.adapter = adapter
        self.inputs = inputs

    def forward(self, h: Tensor) -> Tensor:
        return h + self.inputs if self.adapter is None else self.adapter(h, self.inputs)
