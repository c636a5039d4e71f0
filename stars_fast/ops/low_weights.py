"""Linear maps of fp32 weights through a 16-bit copy of them, whose gradients are added up in fp32.

    y = x L^T + b          L: the copy, made once a step (`refresh`), in memory that stays
    x_bar = y_bar L        W_bar += y_bar^T x,  b_bar += sum(y_bar)

Under autocast autograd would add up the gradients of all uses of a weight in 16 bits, each sum a
pass over memory of its own, and cast the result. Here a use adds to the weight's `grad` itself: on
CUDA inside the product, which has fp32 results of 16-bit factors (`torch.addmm`, `out_dtype`),
elsewhere right after it. Autograd is given no gradient for the weight; it still counts the use, so
that what waits for the weight's gradient, as DDP does, waits for all of them.

Several maps of one input can share a copy, one above the other, and be one node of the graph:
neighbours may be one product, and what they add to x_bar is added inside the products.
A bias moves the primal of a stack alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast.ops.first_derivative import first_derivative


class LowWeights:
    """The 16-bit copy of the weights of linear maps of one input, one above the other.

    Args:
        weights: each [E_i, D], fp32, all on one device, which want a gradient all or none.
        biases: each [E_i], as many as weights, or none.
        dtype: of the copy, made by `refresh`.

    Attributes:
        weight: [E, D], the copies, E the sum of all E_i. parts: its parts [E_i, D].
        bias: [E], or None. bias_parts: its parts.
        rows: the E_i.
        trained: whether the weights want a gradient.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        biases: Sequence[nn.Parameter] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.weights, self.biases = tuple(weights), tuple(biases)
        self.rows = [len(weight) for weight in weights]
        self.trained = self.weights[0].requires_grad
        first = self.weights[0]
        height = sum(self.rows)
        self.weight = torch.empty(height, first.shape[1], dtype=dtype, device=first.device)
        self.parts = self.weight.split(self.rows)
        self.bias = self.weight.new_empty(height) if self.biases else None
        self.bias_parts = () if self.bias is None else self.bias.split(self.rows)

    def part(self, index: int) -> LowWeights:
        """One of the maps alone, in the same memory; `refresh` is for the whole."""
        found = copy(self)
        found.weights, found.rows = (self.weights[index],), [self.rows[index]]
        found.weight, found.parts = self.parts[index], (self.parts[index],)
        if self.bias is not None:
            found.biases, found.bias = (self.biases[index],), self.bias_parts[index]
            found.bias_parts = (found.bias,)
        return found

    @property
    def pairs(self) -> list[tuple[Tensor, nn.Parameter]]:
        """Parts of the copy and what they are copies of."""
        weights = zip(self.parts, self.weights, strict=True)
        return [*weights, *zip(self.bias_parts, self.biases, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(low.nbytes for low, _ in self.pairs)


def refresh(copies: Sequence[LowWeights]) -> None:
    """Copy the weights anew, all of them in one launch where the device has that."""
    pairs = [pair for each in copies for pair in each.pairs]
    if pairs:
        with torch.no_grad():
            lows, weights = zip(*pairs, strict=True)
            torch._foreach_copy_(lows, weights)


def _add_product(weight: nn.Parameter, y_bar: Tensor, x: Tensor) -> None:
    """grad += y_bar^T x, [E, N] times [N, D]."""
    inside = adds_in_product(x.device)
    if weight.grad is None:
        if inside:
            weight.grad = torch.mm(y_bar.mT, x, out_dtype=weight.dtype)
        else:
            weight.grad = (y_bar.mT @ x).to(weight.dtype)
    elif inside:
        torch.addmm(weight.grad, y_bar.mT, x, out_dtype=weight.dtype, out=weight.grad)
    else:
        weight.grad.add_(y_bar.mT @ x)


def _add_sum(bias: nn.Parameter, y_bar: Tensor) -> None:
    """grad += the sum of the rows of y_bar [N, E]."""
    total = y_bar.sum(0, dtype=bias.dtype)
    bias.grad = total if bias.grad is None else bias.grad.add_(total)


@cache
def adds_in_product(device: torch.device) -> bool:
    """Whether products of 16-bit factors add to a fp32 matrix there: tried once, on small ones."""
    if device.type != "cuda":
        return False
    one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def _is_wanted(node: Any) -> bool:
    """Whether the backward that runs is to add to the `grad` of the leaf of this node: not one of
    the gradients of other tensors alone, as `torch.autograd.grad` gives."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:  # which torch has for a leaf that `torch.autograd.grad` was given
        raise RuntimeError(
            "low_linear: expected backward(), got torch.autograd.grad of a weight: its gradient is "
            "added to the weight's own"
        ) from error


class _LowLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, low: LowWeights, together: int, dual: bool, *masters: nn.Parameter
    ) -> tuple[Tensor, ...]:
        if low.trained:
            ctx.save_for_backward(x)
        ctx.low, ctx.dual, ctx.shape = low, dual, x.shape
        rows = low.rows[:together]
        first = sum(rows)
        bias = None if low.bias is None else low.bias[:first]
        y = _affine(x, low.weight[:first], bias, dual)
        ys = [y] if together == 1 else list(y.split(rows, -1))
        for index in range(together, len(low.rows)):
            bias = low.bias_parts[index] if low.biases else None
            ys.append(_affine(x, low.parts[index], bias, dual))
        return tuple(ys)

    @staticmethod
    @first_derivative("low_linear")
    def backward(ctx: Any, *y_bars: Tensor) -> tuple[Tensor | None, ...]:
        low: LowWeights = ctx.low
        x = ctx.saved_tensors[0].reshape(-1, ctx.shape[-1]) if low.trained else None
        wanted = [_is_wanted(node) for node, _ in ctx.next_functions[1:]]
        x_bar: Tensor | None = None
        for index, y_bar in enumerate(y_bars):
            bar = y_bar.reshape(-1, y_bar.shape[-1])
            if x is not None and wanted[index]:
                _add_product(low.weights[index], bar, x)
            if low.biases and low.trained and wanted[len(low.weights) + index]:
                # a tangent has none
                _add_sum(low.biases[index], bar[: len(bar) // 2] if ctx.dual else bar)
            if ctx.needs_input_grad[0]:
                weight = low.parts[index]
                x_bar = bar @ weight if x_bar is None else x_bar.addmm_(bar, weight)
        others = [None] * (len(ctx.needs_input_grad) - 1)
        return None if x_bar is None else x_bar.view(ctx.shape), *others


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, dual: bool) -> Tensor:
    if not dual or bias is None:
        return F.linear(x, weight, bias)
    y = F.linear(x, weight)
    shift = torch.stack((bias, torch.zeros_like(bias)))
    return y + shift.view(2, *[1] * (y.dim() - 2), -1)


def low_linear(x: Tensor, low: LowWeights, *, dual: bool = True) -> Tensor:
    """x L^T + b of the copy of one map; its backward adds to the `grad` of weight and bias.

    Args:
        x: [2, ..., D], or [..., D] with `dual=False`; cast to the copy's dtype.
        low: the copy of one weight [E, D].
        dual: whether `x` is a stack of primal and tangent.

    Returns:
        [2, ..., E] or [..., E], in the copy's dtype.

    Raises:
        ValueError: the last dimension of x is not D.
    """
    (y,) = low_linears(x, low, 1, dual=dual)
    return y


def low_linears(
    x: Tensor, low: LowWeights, together: int = 1, *, dual: bool = True
) -> tuple[Tensor, ...]:
    """`low_linear` of several maps of x, as one node of the graph.

    Args:
        x: as there.
        low: the copy of all of them.
        together: how many of the first are one product; their results are parts of its rows.
        dual: as there.

    Returns:
        A result [.., E_i] for each map.

    Raises:
        ValueError: the last dimension of x is not D.
    """
    if x.shape[-1] != low.weight.shape[1]:
        raise ValueError(
            f"low_linear: x: expected [..., {low.weight.shape[1]}], got {list(x.shape)}"
        )
    masters = (*low.weights, *low.biases) if low.trained else ()
    return _LowLinears.apply(x.to(low.weight.dtype), low, together, dual, *masters)
