"""When a token leaves by the trained exit gate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast.base.checks import check_integer, check_number
from stars_fast.models.ouro.config import OuroConfig
from stars_fast.models.plain_linear import is_plain_linear


def gate_logits(gate: nn.Linear, h: Tensor) -> Tensor:
    """[B, S]: logit of leaving after the turn that gave h [B, S, D]. In fp32 at least: in bf16 the
    probability saturates at 1 from a logit of 6 on, and every token would leave. A module that
    stands in for the gate is called, in its own precision."""
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    if not is_plain_linear(gate):
        return gate(h).squeeze(-1).to(wide)
    with torch.autocast(h.device.type, enabled=False):
        return F.linear(h.to(wide), gate.weight.to(wide), gate.bias.to(wide)).squeeze(-1)


def exit_turns(gates: Tensor, threshold: float) -> Tensor:
    """[...] int64: the turn, counted from 0, whose state each token takes.

    The first at which the probability of having left, 1 - prod(1 - sigmoid(gate)), reaches the
    threshold; the last if none does. Compared on the side of what is left, in logarithms, where
    nothing saturates.

    Args:
        gates: [T, ...] logits in fp32 or fp64.
        threshold: in (0, 1]; 1 is the last turn always.
    """
    last = gates.shape[0] - 1
    if threshold >= 1.0 or last == 0:
        return torch.full(gates.shape[1:], last, dtype=torch.int64, device=gates.device)
    left = F.logsigmoid(-gates[:-1]).cumsum(0)  # log of the probability of being still there
    reached = left <= math.log1p(-threshold)
    return torch.where(reached.any(0), reached.to(torch.uint8).argmax(0), last)


def turns_and_threshold(
    config: OuroConfig, turns: int | None, exit_at_step: int | None, exit_threshold: float | None
) -> tuple[int, float | None]:
    """How many turns a call executes at most, and the exit probability that counts: None where the
    last turn's state is taken anyway. What the call says comes before the configuration.

    Raises:
        ValueError: an argument out of range, or two that contradict each other.
    """
    if exit_at_step is not None and exit_threshold is not None:
        raise ValueError("exit_threshold: expected None when exit_at_step is given, got both")
    if exit_threshold is not None:
        check_number("exit_threshold", exit_threshold, 0.0, 1.0, open_low=True)
    elif exit_at_step is None and turns is None:
        exit_at_step = config.early_exit_step
    limit = config.total_ut_steps if turns is None else turns
    check_integer("turns", limit, 1)
    if exit_at_step is not None:
        check_integer("exit_at_step", exit_at_step, 0)
        if exit_at_step >= limit:
            raise ValueError(f"exit_at_step: expected less than turns={limit}, got {exit_at_step}")
        return exit_at_step + 1, None
    threshold = config.early_exit_threshold if exit_threshold is None else exit_threshold
    return limit, None if threshold is None or threshold >= 1.0 else threshold


def pick_states(states: list[Tensor], turns: Tensor) -> Tensor:
    """[B, S, D]: of each token the state after turn turns[b, s], from T states [B, S, D]."""
    picked = states[-1]
    for turn, state in enumerate(states[:-1]):
        picked = torch.where((turns == turn).unsqueeze(-1), state, picked)
    return picked
