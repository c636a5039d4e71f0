"""Linear maps of a fp32 weight through a 16-bit copy of it, whose gradient is added up in fp32.

    y = x L^T + b          L: the copy, made once a step (`refresh`), in memory that stays
    x_bar = y_bar L        W_bar += y_bar^T x,  b_bar += sum(y_bar)

Under autocast autograd would add up the gradients of all uses of a weight in 16 bits, each sum a
pass over memory of its own, and cast the result. Here a use adds to the weight's `grad` itself: on
CUDA inside the product, which has fp32 results of 16-bit factors (`torch.addmm`, `out_dtype`),
elsewhere right after it. Autograd is given no gradient for the weight; it still counts the use, so
that what waits for the weight's gradient, as DDP does, waits for all of them.

Several weights of one input can share a copy, one above the other: then they are one product.
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
        weight: [E, D], the copies, E the sum of all E_i.
        bias: [E], or None.
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
        self.bias = self.weight.new_empty(height) if self.biases else None

    def part(self, index: int) -> LowWeights:
        """One of the maps alone, in the same memory; `refresh` is for the whole."""
        found = copy(self)
        found.weights, found.rows = (self.weights[index],), [self.rows[index]]
        found.weight = self.weight.split(self.rows)[index]
        if self.bias is not None:
            found.biases, found.bias = (self.biases[index],), self.bias.split(self.rows)[index]
        return found

    @property
    def pairs(self) -> list[tuple[Tensor, nn.Parameter]]:
        """Parts of the copy and what they are copies of."""
        found = list(zip(self.weight.split(self.rows), self.weights, strict=True))
        if self.bias is not None:
            found += zip(self.bias.split(self.rows), self.biases, strict=True)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(low.nbytes for low, _ in self.pairs)

    def add_gradients(self, rows: Tensor, x: Tensor, dual: bool) -> None:
        """Add those of one use to the `grad` of the weights: rows of y_bar [N, E], x [N, D]."""
        _add_product(self.weights, rows, x)
        if self.biases:
            counted = rows[: len(rows) // 2] if dual else rows  # a tangent has no bias
            sums = counted.sum(0, dtype=self.biases[0].dtype)
            for bias, part in zip(self.biases, sums.split(self.rows), strict=True):
                bias.grad = part.clone() if bias.grad is None else bias.grad.add_(part)


def refresh(copies: Sequence[LowWeights]) -> None:
    """Copy the weights anew, all of them in one launch where the device has that."""
    pairs = [pair for each in copies for pair in each.pairs]
    if pairs:
        with torch.no_grad():
            lows, weights = zip(*pairs, strict=True)
            torch._foreach_copy_(lows, weights)


def _add_product(weights: Sequence[nn.Parameter], y_bar: Tensor, x: Tensor) -> None:
    """grad += y_bar^T x, [E, N] times [N, D], for weights of E rows together."""
    total = _together(weights)
    if total is not None:
        if adds_in_product(x.device):
            torch.addmm(total, y_bar.mT, x, out_dtype=total.dtype, out=total)
        else:
            total.add_(y_bar.mT @ x)
        return
    parts = y_bar.split([len(weight) for weight in weights], 1)
    if any(weight.grad is not None for weight in weights):  # some, or not side by side
        for weight, part in zip(weights, parts, strict=True):
            _add_product([weight], part, x)
        return
    if adds_in_product(x.device):
        total = torch.mm(y_bar.mT, x, out_dtype=weights[0].dtype)
    else:
        total = (y_bar.mT @ x).to(weights[0].dtype)
    for weight, part in zip(weights, total.split([len(w) for w in weights]), strict=True):
        weight.grad = part


def _together(weights: Sequence[nn.Parameter]) -> Tensor | None:
    """The gradients of weights as one matrix, where they lie one behind the other in memory."""
    grads = [weight.grad for weight in weights]
    first = grads[0]
    if first is None or len(grads) == 1:
        return first
    place = first.data_ptr()
    memory = first.untyped_storage().data_ptr()
    for each in grads:
        if each is None or not each.is_contiguous() or each.data_ptr() != place:
            return None
        if each.untyped_storage().data_ptr() != memory:
            return None
        place += each.nbytes
    height, width = sum(len(weight) for weight in weights), first.shape[1]
    return first.as_strided((height, width), (width, 1))


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


class _LowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: LowWeights, dual: bool, *masters: nn.Parameter) -> Tensor:
        if low.trained:
            ctx.save_for_backward(x)
        ctx.low, ctx.dual, ctx.shape = low, dual, x.shape
        if not dual or low.bias is None:
            return F.linear(x, low.weight, low.bias)
        shift = torch.stack((low.bias, torch.zeros_like(low.bias)))
        y = F.linear(x, low.weight)
        return y + shift.view(2, *[1] * (y.dim() - 2), -1)

    @staticmethod
    @first_derivative("low_linear")
    def backward(ctx: Any, y_bar: Tensor) -> tuple[Tensor | None, ...]:
        low: LowWeights = ctx.low
        # As a matrix once: each op costs the host, also one that moves nothing
        rows = y_bar.reshape(-1, y_bar.shape[-1])
        if low.trained:
            (x,) = ctx.saved_tensors
            low.add_gradients(rows, x.reshape(-1, x.shape[-1]), ctx.dual)
        x_bar = (rows @ low.weight).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return x_bar, None, None, *[None] * (len(ctx.needs_input_grad) - 3)


def low_linear(x: Tensor, low: LowWeights, *, dual: bool = True) -> Tensor:
    """x L^T + b of the copy; its backward adds to the `grad` of the weights and biases.

    Args:
        x: [2, ..., D], or [..., D] with `dual=False`; cast to the copy's dtype.
        low: of rows [E, D].
        dual: whether `x` is a stack of primal and tangent.

    Returns:
        [2, ..., E] or [..., E], in the copy's dtype.

    Raises:
        ValueError: the last dimension of x is not D.
    """
    if x.shape[-1] != low.weight.shape[1]:
        raise ValueError(
            f"low_linear: x: expected [..., {low.weight.shape[1]}], got {list(x.shape)}"
        )
    masters = (*low.weights, *low.biases) if low.trained else ()
    return _LowLinear.apply(x.to(low.weight.dtype), low, dual, *masters)
