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
ADAPTER_STARTS = ("state", "inputs")


def check_injection(injection: str, state: str, adapter_start: str | None) -> None:
    """Raise ValueError for settings of a loop that do not go together.

    Args:
        injection: one of `INJECTIONS`.
        state: what the first turn starts from; prelude is the prelude's output.
        adapter_start: one of `ADAPTER_STARTS` or None.
    """
    if injection == "none" and state != "prelude":
        raise ValueError(
            f"injection: expected add or adapter with state {state!r}, which has nothing of the "
            "tokens, got 'none'"
        )
    if adapter_start not in (None, *ADAPTER_STARTS):
        raise ValueError(
            f"adapter_start: expected one of {', '.join(ADAPTER_STARTS)} or none, got "
            f"{adapter_start!r}"
        )
    if adapter_start is not None and injection != "adapter":
        raise ValueError(
            f"adapter_start: expected none with injection {injection}, which has no adapter, got "
            f"{adapter_start}"
        )


def adapter_keeps_state(adapter_start: str | None, state: str) -> bool:
    """Whether an adapter gives the state before training, and not the prelude's output: as
    `adapter_start` says, or with None where the first state is the prelude's output."""
    return state == "prelude" if adapter_start is None else adapter_start == "state"


class Adapter(nn.Module):
    """A linear map of the state and the prelude's output, [B, S, D] each, to what a turn reads.

    It starts as one of the two, as it is.

    Args:
        width: D.
        keeps_state: whether it starts as the state (`adapter_keeps_state`).
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
