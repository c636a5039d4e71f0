"""One dual pass: any block, one stack in, one stack out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.block_modules import release_duals
from stars_fast.dual.pass_mode import Pass
from stars_fast.dual.patches import surroundings
from stars_fast.dual.running import forget_waiting
from stars_fast.dual.tensor import Dual, check_history
from stars_fast.ops.spans import masks_of_one_pass


@torch.compiler.disable
def dual_pass(
    block: Callable[..., Any], stack: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """Run `block(Dual(stack), *args, **kwargs)` and return the stack of its first output.

    Args:
        block: module or callable; a tuple, list, mapping or model output counts by its first
            element.
        stack: [2, *h.shape], primal and tangent.

    Returns:
        [2, *output.shape].

    Raises:
        TypeError: the block returned no tensor, or one that does not depend on its input.
    """
    result = None
    try:
        with surroundings(), masks_of_one_pass(), Pass():
            forget_waiting()  # what an earlier pass that failed has left
            output = first_output(block(Dual(stack), *args, **kwargs))
            if type(output) is Dual:
                check_history(output)
                result = output.stack  # what it waits for runs inside of the pass
    finally:
        release_duals(block)
        forget_waiting()
    if result is None:
        raise TypeError(
            "block: expected its (first) output to be a tensor that depends on h, got "
            + (
                f"a constant tensor of shape {list(output.shape)}: was it detached or rebuilt?"
                if isinstance(output, Tensor)
                else type(output).__name__
            )
        )
    return result


def first_output(output: Any) -> Any:
    """The tensor a block's output counts by."""
    while not isinstance(output, Tensor):
        if isinstance(output, dict) and output:
            output = next(iter(output.values()))
        elif isinstance(output, (tuple, list)) and output:
            output = output[0]
        else:
            break
    return output
