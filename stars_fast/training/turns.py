"""The turns of the shared block, all or only the last of them in the graph."""

from collections.abc import Callable

import torch
from torch import Tensor


def run_turns(
    block: Callable[[Tensor], Tensor], h: Tensor, turns: int, backprop_turns: int | None = None
) -> list[Tensor]:
    """Apply `block` `turns` times to h^(0) = `h` [B, S, D]; the states that are in the graph.

    Returns [h^(0), ..., h^(turns)], or with `backprop_turns` = k < turns the last k + 1 of them:
    the turns before run without a graph and the gradient stops at h^(turns - k).
    """
    start = h
    skipped = 0 if backprop_turns is None else max(turns - backprop_turns, 0)
    if skipped:
        with torch.no_grad():
            for _ in range(skipped):
                h = block(h)
        # The prelude then gets a gradient of zero rather than none, so that every parameter takes
        # part in every step, as data-parallel reduction expects.
        h = h + 0.0 * start
    states = [h]
    for _ in range(turns - skipped):
        states.append(block(states[-1]))
    return states
