"""The last linear map of a block, where the tangent of the block alone is asked for.

    x + W f(x), with or without sums after the map

`fused_jsrr` reads no primal output, and no cotangent flows back into one. So a linear map whose
result has the shape of the state waits (`steps.py`), and so does a sum with it. Where the pass ends
with what waits, `tangent_of` computes the tangent alone: half of the map, forward and backward,
a tenth of a block of one layer. Whoever else reads such a Dual, or still has one when the pass
ends, has it computed as a pair, as it was called.

Nothing waits where it might miss its place: in a region of the block that packs what autograd
saves, such as a checkpointed one, under autocast, and beside process groups, since FSDP frees
weights as soon as their module is left.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stars_fast.dual.packing import packing_hooks
from stars_fast.dual.recognition.steps import (
    Step,
    check_unchanged,
    dtype_of,
    is_open,
    is_plain,
    recorder,
    shape_of,
    step_of,
    wait,
)
from stars_fast.dual.running import state
from stars_fast.dual.tensor import Dual, answer
from stars_fast.ops.precision import no_autocast
from stars_fast.ops.tangent_linear import tangent_linear

_MAP, _SUM = "linear map", "sum with a linear map"


def _keeps_its_place(device: torch.device) -> bool:
    """Whether an op may as well run later."""
    running = state.running
    if running is None or packing_hooks(False) != running.packing:
        return False
    if torch.is_autocast_enabled(device.type):
        return False
    return not (dist.is_available() and dist.is_initialized())


def _waits(x: Dual) -> Step | None:
    return step_of(x, _MAP) or step_of(x, _SUM)


@recorder("linear")
def follow_linear(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    running = state.running
    if running is None or running.tangent_of is None or kwargs or not 2 <= len(args) <= 3:
        return None
    x, weight, bias = args if len(args) == 3 else (*args, None)
    if not is_open(x) or not is_plain(weight) or not (bias is None or is_plain(bias)):
        return None
    stack = x.stack
    shape = (*stack.shape[1:-1], len(weight))
    if shape != running.tangent_of or weight.shape != (shape[-1], stack.shape[-1]):
        return None
    if bias is not None and not (bias.shape == shape[-1:] and _alike(bias, stack)):
        return None
    if not _alike(weight, stack) or not stack.numel() or not _keeps_its_place(stack.device):
        return None

    def run() -> Any:
        with no_autocast(stack):
            return answer(func, (x, weight, bias), {})

    found = wait(_MAP, x, run, value=(weight, bias), shape=torch.Size(shape), uses=weight)
    if bias is not None:
        found.step.held += ((bias, bias._version),)
    return found


def _alike(x: Tensor, other: Tensor) -> bool:
    return x.dtype == other.dtype and x.device == other.device


@recorder("add", "__add__")
def follow_sum(func: Any, args: tuple, kwargs: dict) -> Dual | None:
    if len(args) != 2 or kwargs or type(args[0]) is not Dual or type(args[1]) is not Dual:
        return None
    of, other = args if _waits(args[0]) else (args[1], args[0])
    step = _waits(of)
    if step is None or not _keeps_its_place(step.device):
        return None
    if shape_of(other) != step.shape or dtype_of(other) != step.dtype:
        return None
    return wait(_SUM, of, (func, args, kwargs), other, uses=None if _waits(other) else other.stack)


def tangent_of(found: list[Dual]) -> Tensor:
    """The tangent of the one Dual in `found`, which is taken out: [*shape].

    Where it waits for a linear map, or sums with one, and nobody else has it, that is all that is
    computed; otherwise it is computed as a pair.
    """
    tangents: list[Tensor] = []
    maps: list[Step] = []
    held: tuple[tuple[Tensor, int], ...] = ()
    while found:
        dual: Dual | None = found.pop()
        assert dual is not None
        step = _waits(dual)
        if step is not None and _keeps_its_place(step.device):
            known = weakref.ref(dual)
            del dual
            dual = known()  # None where nobody else has it
        if dual is not None:
            tangents.append(dual.stack[1])
        elif step is not None and step.kind == _MAP:
            maps.append(step)
        elif step is not None:
            found += step.of, step.value
            held += step.held
        del dual, step  # a sum holds what it is of
    check_unchanged(held)
    for step in maps:
        check_unchanged(step.held)
        tangents.append(tangent_linear(step.of.stack, *step.value))
    return functools.reduce(torch.add, tangents)
