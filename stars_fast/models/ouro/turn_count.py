"""The turns that a model executes, counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class TurnCount:
    """Turns that were executed, call by call.

    Attributes:
        calls: [B, S] int64 each: turns that each (new) token of a call took.
        real: [B, S] boolean each, or None: which of them are no pads.
    """

    calls: list[Tensor] = field(default_factory=list)
    real: list[Tensor | None] = field(default_factory=list)

    @property
    def per_token(self) -> float:
        """Mean over all real tokens."""
        taken = [
            turns.flatten() if real is None else turns[real]
            for turns, real in zip(self.calls, self.real, strict=True)
        ]
        return torch.cat(taken).double().mean().item() if taken else 0.0


@contextmanager
def count_turns(model: nn.Module) -> Iterator[TurnCount]:
    """Count the turns that a model executes inside, `generate` included. What `generate` computes
    for rows of a batch that are done already counts too.

        with count_turns(model) as count:
            model.generate(**inputs, turns=8, tol=1e-3)
        print(count.per_token)

    Args:
        model: an `OuroForCausalLM`, a `LoopedDecoderForCausalLM`, either without its head, a
            `HuginnForCausalLM`, or a module that holds one of these.
    """
    count = TurnCount()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        count.calls.append(output.turns)
        count.real.append(output.real)

    # Of the class: PEFT's wrappers give the attributes of what they wrap as their own
    inner = [each for each in model.modules() if getattr(type(each), "takes_turns", None) is True]
    if len(inner) != 1:
        raise TypeError(
            "model: expected a module that holds one Ouro, Huginn or looped decoder, got "
            f"{type(model).__name__} with {len(inner)}"
        )
    hook = inner[0].register_forward_hook(note)
    try:
        yield count
    finally:
        hook.remove()
