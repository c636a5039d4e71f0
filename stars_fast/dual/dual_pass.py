"""One dual pass: any block, one stack in, one stack out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.block_modules import release_duals
from stars_fast.dual.pass_mode import Pass
from stars_fast.dual.patches import surroundings
from stars_fast.dual.recognition.last_map import tangent_of
from stars_fast.dual.running import forget_waiting, running_pass, settle_all
from stars_fast.dual.tensor import Dual, check_history
from stars_fast.ops.spans import masks_of_one_pass

_UNKNOWN_TO_TRANSFORMS = ("setup_context", "Cannot access storage")
"""Words of errors of torch, where a transform meets a custom function or asks for an address."""


@torch._disable_dynamo  # as `torch.compiler.disable`, which loads the compiler here and now
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
    return _run(block, stack, args, kwargs, tangent_alone=False)


@torch._disable_dynamo
def tangent_pass(
    block: Callable[..., Any], stack: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """As `dual_pass`, for the tangent alone, [*output.shape]: what only the primal output needs is
    left out (`recognition.last_map`)."""
    return _run(block, stack, args, kwargs, tangent_alone=True)


def _run(
    block: Callable[..., Any],
    stack: Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tangent_alone: bool,
) -> Tensor:
    if running_pass() is not None:
        settle_all()  # of the pass around this one
    running = Pass(stack.shape[1:] if tangent_alone else None)
    try:
        with surroundings(), masks_of_one_pass(), running:
            forget_waiting()  # what an earlier pass that failed has left
            found = [first_output(block(Dual(stack), *args, **kwargs))]
            if type(found[0]) is not Dual:
                raise _no_output(found[0])
            check_history(found[0])
            if not tangent_alone:
                return found[0].stack  # what it waits for runs inside of the pass
            tangent = tangent_of(found)
            settle_all()  # what someone has kept, and may read later
            return tangent
    except RuntimeError as error:
        outside = torch._C._functorch.peek_interpreter_stack() is None
        if outside or not any(words in str(error) for words in _UNKNOWN_TO_TRANSFORMS):
            raise
        raise RuntimeError(
            "stars_fast: a dual pass inside torch.vmap or a transform of torch.func: the ops that "
            "carry the tangent know no such transforms; call fused_jvp or fused_jsrr outside of "
            "them, on a state with one dimension more, or in a loop"
        ) from error
    finally:
        running.release()
        release_duals(block)
        forget_waiting()


def _no_output(output: Any) -> TypeError:
    got = type(output).__name__
    if isinstance(output, Tensor):
        got = f"a constant tensor of shape {list(output.shape)}: was it detached or rebuilt?"
    return TypeError(
        f"block: expected its (first) output to be a tensor that depends on h, got {got}"
    )


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
