"""Ouro's training objective: expected loss over the turns at which a token may leave, less beta
times the entropy of that choice: stage I, equation 3 of Zhu et al. 2025, "Scaling Latent Reasoning
via Looped Language Models", https://arxiv.org/abs/2510.25741.

With gate logits a_t of turns 1 ... T and lambda_t = sigmoid(a_t):
    p_t = lambda_t prod_{j<t} (1 - lambda_j) for t < T        p_T = prod_{j<T} (1 - lambda_j)
    loss = 1/n sum_i (sum_t p_t,i nll_t,i - beta H(p_i))      H(p) = -sum_t p_t log p_t
over the n supervised tokens i. The entropy term is the divergence from a uniform choice, but for a
constant: it keeps the gate from settling on one turn before the others are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.ops.arguments import check_stack
from stars_fast.ops.linear_cross_entropy import (
    averaged,
    check_head,
    check_supervised,
    check_tensor,
    summed_loss,
    supervised_positions,
)


class ExitLoss(NamedTuple):
    """loss: scalar, fp32 (fp64 for fp64). nll: [T, ...] in nats, and exits: [T, ...], p_t, of each
    turn and token; both without gradient, 0 where nothing is supervised."""

    loss: Tensor
    nll: Tensor
    exits: Tensor


def _log_exits(gates: Tensor) -> Tensor:
    """log p_t [T, ...], in fp32 at least: in logarithms nothing saturates."""
    wide = gates.to(torch.promote_types(gates.dtype, torch.float32))
    stay = F.logsigmoid(-wide[:-1]).cumsum(0)  # log of the probability of being there after turn t
    before = torch.cat((torch.zeros_like(wide[:1]), stay))
    leave = torch.cat((F.logsigmoid(wide[:-1]), torch.zeros_like(wide[:1])))
    return before + leave


def exit_distribution(gates: Tensor) -> Tensor:
    """The probability of leaving after each turn.

    Args:
        gates: [T, ...] logits of the exit gate after each turn, finite, of any floating dtype. The
            last turn takes what is left, whatever its gate says.

    Returns:
        [T, ...], fp32 (fp64 for fp64), summing to 1 over T.

    Raises:
        TypeError, ValueError: `gates` is not floating point, or has no turn.
    """
    if not gates.is_floating_point():
        raise TypeError(f"exit_distribution: gates must be floating point, got {gates.dtype}")
    if gates.dim() == 0 or len(gates) == 0:
        raise ValueError(
            f"exit_distribution: gates must be [T, ...] with T >= 1, got {list(gates.shape)}"
        )
    return _log_exits(gates).exp()


def exit_weighted_loss(
    states: Sequence[Tensor],
    gates: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    beta: float = 0.1,
    ignore_index: int = -100,
    count: Tensor | float | None = None,
    chunk: int | None = None,
    supervised: Tensor | None = None,
    backend: str | None = None,
) -> ExitLoss:
    """Stage I of Ouro's training: every turn's token loss, weighted by the probability of leaving
    there, less the entropy of leaving.

    All turns share one pass through the head, a chunk of supervised tokens at a time, so that one
    gradient of `weight` is kept, not T; memory and what is not supported are as in
    `linear_cross_entropy`, for T times the tokens.

    Args:
        states: T tensors [..., D], what the head reads after each turn (Ouro's states already went
            through its closing norm).
        gates: [T, ...] logits of the exit gate after each turn; the gradient reaches them through
            the weights of the token losses and the entropy. Keep them in fp32.
        weight: [V, D], the head.
        labels: [...] int64, aligned to the states: nothing is shifted.
        beta: weight of the entropy. The paper lowers it as training goes on.
        ignore_index, count, chunk, supervised, backend: as in `linear_cross_entropy`, but
            `ignore_index` is a number; `supervised` and `count` are of the tokens of one turn.

    Returns:
        `ExitLoss(loss, nll, exits)`.

    Raises:
        TypeError, ValueError, ImportError: an argument that does not fit, named.
    """
    op = "exit_weighted_loss"
    if len(states) == 0:
        raise ValueError(f"{op}: states must be a tensor a turn, one at least, got none")
    check_head(op, "states[0]", states[0], weight, labels)
    turns, shape, width = len(states), labels.shape, weight.shape[1]
    for turn, state in enumerate(states):
        check_tensor(op, f"states[{turn}]", state, labels.device)
        check_stack(op, f"states[{turn}]", state, dual=False)
        if state.shape != states[0].shape:
            raise ValueError(
                f"{op}: states[{turn}] must be {[*shape, width]}, got {list(state.shape)}"
            )
    check_tensor(op, "gates", gates, labels.device)
    check_stack(op, "gates", gates, dual=False)
    if gates.shape != (turns, *shape):
        raise ValueError(
            f"{op}: gates must be {[turns, *shape]} for {turns} states and labels {list(shape)}, "
            f"got {list(gates.shape)}"
        )
    if supervised is None:
        supervised = supervised_positions(labels, ignore_index)
    else:
        check_supervised(op, supervised, labels)
    targets = labels.reshape(-1).index_select(0, supervised)
    log_exits = _log_exits(gates.reshape(turns, labels.numel()).index_select(1, supervised))
    exits = log_exits.exp()
    total, nll = summed_loss(
        op,
        "states",
        # Each turn's rows have no name: only their concatenation is there during the pass.
        torch.cat([state.reshape(-1, width).index_select(0, supervised) for state in states]),
        weight,
        targets.repeat(turns),
        exits.flatten(),
        chunk,
        backend,
    )
    total = total + beta * (exits * log_exits).sum()

    def placed(values: Tensor) -> Tensor:
        everywhere = values.new_zeros(turns, labels.numel())
        return everywhere.index_copy(1, supervised, values).view(turns, *shape)

    loss = averaged(op, total, len(targets), count)
    return ExitLoss(loss, placed(nll.view(turns, -1)), placed(exits.detach()))
