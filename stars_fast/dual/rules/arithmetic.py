"""Arithmetic and products between Dual, tensor and number."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.forward_ad import jvp
from stars_fast.dual.in_place import assign, check_writable
from stars_fast.dual.registry import add_rule
from stars_fast.dual.rule import rule
from stars_fast.dual.tensor import Dual, align, primal_of
from stars_fast.ops.bias import add_bias
from stars_fast.ops.gated import gated


def split_pair(x: Any) -> tuple[Any, Tensor | None]:
    """Primal and tangent; None for the tangent of a constant."""
    return (x.stack[0], x.stack[1]) if type(x) is Dual else (x, None)


def _ndim(x: Any) -> int:
    return x.dim() if isinstance(x, Tensor) else 0


def _plain_stacks(a: Any, b: Any) -> bool:
    """Whether broadcasting the stacks gives the dtype that the primals would: true unless a
    zero-dimensional operand, which does not take part in promotion, is stacked to one dimension."""
    return all(type(x) is not Dual or x.stack.dim() > 1 for x in (a, b))


# -- sums


def _linear_sum(input: Any, other: Any, alpha: Any) -> Dual:
    """input + alpha * other."""
    if type(input) is Dual and type(other) is Dual and _plain_stacks(input, other):
        ndim = max(input.stack.dim(), other.stack.dim()) - 1
        return Dual(torch.add(align(input.stack, ndim), align(other.stack, ndim), alpha=alpha))
    (a, a_dot), (b, b_dot) = split_pair(input), split_pair(other)
    primal = torch.add(a, b, alpha=alpha)
    if a_dot is None:
        tangent = b_dot * alpha
    else:
        tangent = a_dot if b_dot is None else torch.add(a_dot, b_dot, alpha=alpha)
    return Dual.join(primal, tangent)


@rule("add", "__add__", kind="stacked")
def addition_rule(input: Any, other: Any, *, alpha: Any = 1) -> Dual:
    return _linear_sum(input, other, alpha)


@rule("__radd__", kind="stacked")
def radd(input: Any, other: Any) -> Dual:
    return _linear_sum(other, input, 1)


@rule("sub", "subtract", "__sub__", kind="stacked")
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Dual:
    return _linear_sum(input, other, -alpha)


@rule("rsub", "__rsub__", kind="stacked")
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Dual:
    return _linear_sum(other, input, -alpha)


@rule("neg", "negative", "__neg__", kind="stacked", inplace=True)
def neg(input: Dual) -> Dual:
    return Dual(-input.stack)


@rule("positive", "__pos__", kind="stacked")
def pos(input: Dual) -> Dual:
    return input


def _add_inplace(name: str, sign: int) -> None:
    def apply(input: Any, other: Any, *, alpha: Any = 1) -> Dual:
        check_writable(name, input)
        if type(other) is Dual:
            return assign_sum(input, align(other.stack, input.stack.dim() - 1), sign * alpha)
        input.stack[0].add_(other, alpha=sign * alpha)
        return input

    def assign_sum(input: Dual, other: Tensor, alpha: Any) -> Dual:
        input.stack.add_(other, alpha=alpha)
        return input

    add_rule(name, "in-place", apply)


for _name, _sign in (("add_", 1), ("__iadd__", 1), ("sub_", -1), ("__isub__", -1)):
    _add_inplace(_name, _sign)


# -- products


@rule("mul", "multiply", "__mul__", kind="product", inplace=True)
def mul(input: Any, other: Any) -> Dual:
    (a, a_dot), (b, b_dot) = split_pair(input), split_pair(other)
    if a_dot is not None and b_dot is not None:
        alike = a.shape == b.shape and a.dtype == b.dtype and not a.is_complex()
        # One op keeps both factors for its backward; eager keeps one only for the other's gradient.
        both = input.stack.requires_grad == other.stack.requires_grad
        if alike and both and a.is_contiguous() and b.is_contiguous():
            return Dual(gated(input.stack, other.stack, "identity"))
        return Dual.join(a * b, torch.addcmul(a_dot * b, a, b_dot))
    if b_dot is None:
        if _plain_stacks(input, b):
            return Dual(align(input.stack, _ndim(b)) * b)
        return Dual.join(a * b, a_dot * b)
    # In the order of the call: the result has the memory order of the first.
    if _plain_stacks(other, a):
        return Dual(a * align(other.stack, _ndim(a)))
    return Dual.join(a * b, a * b_dot)


@rule("__rmul__", kind="product")
def rmul(input: Any, other: Any) -> Dual:
    return mul(other, input)


@rule("div", "divide", "true_divide", "__truediv__", "__div__", kind="product", inplace=True)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    (a, a_dot), (b, b_dot) = split_pair(input), split_pair(other)
    if rounding_mode is not None:
        # Piecewise constant: a value with a zero tangent.
        return torch.div(a, b, rounding_mode=rounding_mode)
    if b_dot is None:
        if _plain_stacks(input, other):
            return Dual(align(input.stack, _ndim(b)) / b)
        return Dual.join(a / b, a_dot / b)
    y = a / b
    rise = -y * b_dot if a_dot is None else a_dot - y * b_dot
    return Dual.join(y, rise / b)


@rule("__rtruediv__", "__rdiv__", kind="product")
def rdiv(input: Any, other: Any) -> Dual:
    return div(other, input)


@rule("pow", "__pow__", kind="product", inplace=True)
def power(input: Any, exponent: Any) -> Dual:
    (a, a_dot), (n, n_dot) = split_pair(input), split_pair(exponent)
    if n_dot is None and not isinstance(n, Tensor) and a_dot is not None:
        if n == 2:
            return Dual.join(a * a, 2 * a * a_dot)
        return Dual.join(a**n, n * a ** (n - 1) * a_dot if n else torch.zeros_like(a_dot))
    return jvp(torch.pow, "pow", (input, exponent), {})


@rule("__rpow__", kind="product")
def rpow(input: Any, other: Any) -> Any:
    if isinstance(other, numbers.Number):  # the memory order is not that of a tensor's power
        number = int(other) if isinstance(other, bool) else other
        return jvp(torch.pow, "pow", (number, input), {})
    return power(torch.as_tensor(other, dtype=input.dtype, device=input.device), input)


@rule("addcmul", kind="product", inplace=True)
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return input + value * (tensor1 * tensor2)


@rule("addcdiv", kind="product", inplace=True)
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return input + value * (tensor1 / tensor2)


@rule("lerp", kind="product", inplace=True)
def lerp(input: Any, end: Any, weight: Any) -> Any:
    return input + weight * (end - input)


@rule("where", kind="product", owners=(torch.Tensor,))
def where_method(input: Any, condition: Any, other: Any) -> Dual:
    """x.where(condition, other)."""
    return where(condition, input, other)


@rule("where", kind="product", owners=(torch,))
def where(condition: Any, input: Any, other: Any) -> Dual:
    condition = primal_of(condition)
    (a, a_dot), (b, b_dot) = split_pair(input), split_pair(other)
    tangent = torch.where(
        condition, 0.0 if a_dot is None else a_dot, 0.0 if b_dot is None else b_dot
    )
    return Dual.join(torch.where(condition, a, b), tangent)


@rule("masked_fill", kind="product", inplace=True)
def masked_fill(input: Any, mask: Any, value: Any) -> Dual:
    mask = primal_of(mask)
    if type(input) is not Dual or type(value) is Dual:
        return where(mask, value, input)
    return Dual.join(input.stack[0].masked_fill(mask, value), input.stack[1].masked_fill(mask, 0.0))


@rule("copy_", kind="in-place")
def copy_(input: Any, src: Any, non_blocking: bool = False) -> Any:
    if type(input) is not Dual and not (input.is_floating_point() or input.is_complex()):
        return input.copy_(src.stack[0])  # integers take values, which have no tangent
    check_writable("copy_", input)
    return assign("copy_", input, src.expand(input.shape) if isinstance(src, Tensor) else src)


@rule("zero_", kind="in-place")
def zero_(input: Dual) -> Dual:
    check_writable("zero_", input)
    input.stack.zero_()
    return input


@rule("fill_", kind="in-place")
def fill_(input: Any, value: Any) -> Dual:
    check_writable("fill_", input)
    primal, tangent = split_pair(value)
    input.stack[0].fill_(primal)
    input.stack[1].fill_(0.0 if tangent is None else tangent)
    return input


@rule("fill_diagonal_", kind="in-place")
def fill_diagonal_(input: Dual, fill_value: Any, wrap: bool = False) -> Dual:
    check_writable("fill_diagonal_", input)
    place = torch.zeros(input.shape, dtype=torch.bool, device=input.device)
    place.fill_diagonal_(True, wrap)
    return assign(
        "fill_diagonal_", input, masked_fill(Dual(input.stack.clone()), place, fill_value)
    )


# -- matrix products


def _is_sparse(x: Tensor) -> bool:
    return x.layout != torch.strided


@rule("matmul", "__matmul__", "bmm", "mm", "spmm", kind="stacked")
def matmul(input: Any, other: Any) -> Any:
    (a, a_dot), (b, b_dot) = split_pair(input), split_pair(other)
    if a_dot is not None and b_dot is not None:
        return Dual.join(a @ b, a_dot @ b + a @ b_dot)
    if _is_sparse(a) or _is_sparse(b):  # knows no third dimension
        return Dual.join(a @ b, a @ b_dot if a_dot is None else a_dot @ b)
    if b_dot is None:
        if a.dim() == 1 and b.dim() > 2:
            return matmul(input.unsqueeze(0), b).squeeze(-2)
        return Dual(align(input.stack, b.dim() if b.dim() > 2 else 0) @ b)
    if b.dim() == 1:
        return matmul(a, other.unsqueeze(-1)).squeeze(-1)
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), other).squeeze(-2)
    return Dual(a @ align(other.stack, a.dim()))


def _register_half_products() -> None:
    """Products of each half: of mv and dot, to which autocast does other things than to matmul, and
    with sparse matrices."""
    everywhere = (torch, torch.Tensor)
    for name, owners in (("mv", everywhere), ("dot", everywhere), ("mm", (torch.sparse,))):
        func = getattr(owners[0], name)

        def handler(input: Any, other: Any, *, _func: Any = func) -> Dual:
            (a, a_dot), (b, b_dot) = split_pair(input), split_pair(other)
            terms = ((a_dot, b), (a, b_dot))
            products = [_func(x, y) for x, y in terms if x is not None and y is not None]
            return Dual.join(_func(a, b), sum(products[1:], start=products[0]))

        add_rule(name, "product", handler, owners=owners)


_register_half_products()


@rule("__rmatmul__", kind="stacked")
def rmatmul(input: Any, other: Any) -> Any:
    return matmul(other, input)


def _add_product(input: Any, product: Any, beta: Any, alpha: Any) -> Any:
    if torch.is_autocast_enabled(product.device.type):
        input = input.to(product.dtype)
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    if beta == 1 and type(input) is not Dual and type(product) is Dual and input.dim() == 1:
        return Dual(add_bias(product.stack, input))
    # The product first: the sum has its memory order, as eager's.
    return product + (input * beta if beta != 1 else input)


@rule("addmm", "baddbmm", kind="stacked", inplace=True)
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _add_product(input, torch.matmul(mat1, mat2), beta, alpha)


@rule("addmv", kind="stacked", inplace=True)
def addmv(input: Any, mat: Any, vec: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _add_product(input, torch.mv(mat, vec), beta, alpha)


@rule("addbmm", kind="stacked")
def addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _add_product(input, torch.matmul(batch1, batch2).sum(0), beta, alpha)


@rule("outer", "ger", kind="product")
def outer(input: Any, vec2: Any) -> Any:
    return input[:, None] * vec2[None, :]


@rule("einsum", kind="product")
def einsum(equation: Any, *operands: Any) -> Dual:
    """Linear in each operand: one term for each Dual among them."""
    if not isinstance(equation, str):
        return jvp(torch.einsum, "einsum", (equation, *operands), {})
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    primals = [primal_of(each) for each in operands]
    tangent: Any = 0
    for i, each in enumerate(operands):
        if type(each) is Dual:
            varied = [*primals[:i], each.stack[1], *primals[i + 1 :]]
            tangent = tangent + torch.einsum(equation, *varied)
    return Dual.join(torch.einsum(equation, *primals), tangent)
