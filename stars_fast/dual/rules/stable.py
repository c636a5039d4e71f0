"""Rules for what torch differentiates well at ordinary numbers alone: not where terms are large,
equal or zero. Each is a value of torch's and a tangent out of parts that stay finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.dual.forward_ad import jvp
from stars_fast.dual.precision import widened
from stars_fast.dual.rule import rule
from stars_fast.dual.rules.arithmetic import split_pair
from stars_fast.dual.rules.functional import eager_dtype
from stars_fast.dual.rules.shapes import shift
from stars_fast.dual.tensor import Dual, primal_of
from stars_fast.ops.determinant import determinant
from stars_fast.ops.precision import no_autocast
from stars_fast.ops.scan import logcumsumexp as dual_logcumsumexp


def _sum_of(*terms: tuple[Tensor, Tensor | None]) -> Any:
    """The sum of slope * tangent over the terms that have a tangent."""
    products = [slope * dot for slope, dot in terms if dot is not None]
    return sum(products[1:], start=products[0])


# -- two arguments


def _log_add(func: Callable[..., Tensor], input: Any, other: Any, log_base: float) -> Tensor:
    """y = log(exp a + exp b), y_dot = s a_dot + (1 - s) b_dot with s = sigmoid(a - b)."""
    (a, a_dot), (b, b_dot) = split_pair(widened(input)), split_pair(widened(other))
    same = torch.isinf(a) & (a == b)
    finite_a, finite_b = torch.where(same, 0.0, a), torch.where(same, 0.0, b)
    d = (finite_a - finite_b) * log_base
    tangent = _sum_of((torch.sigmoid(d), a_dot), (torch.sigmoid(-d), b_dot))
    value = torch.where(same, a, func(finite_a, finite_b))
    return Dual.join(value, tangent).to(torch.result_type(primal_of(input), primal_of(other)))


@rule("logaddexp", kind="product")
def logaddexp(input: Any, other: Any) -> Tensor:
    return _log_add(torch.logaddexp, input, other, 1.0)


@rule("logaddexp2", kind="product")
def logaddexp2(input: Any, other: Any) -> Tensor:
    return _log_add(torch.logaddexp2, input, other, math.log(2.0))


@rule("atan2", "arctan2", kind="product")
def atan2(input: Any, other: Any) -> Tensor:
    """At the origin the derivative is 0, as PyTorch's gradient."""
    (a, a_dot), (b, b_dot) = split_pair(widened(input)), split_pair(widened(other))
    square = a * a + b * b
    origin = square == 0
    inverse = (1 / torch.where(origin, 1.0, square)).masked_fill(origin, 0.0)
    tangent = _sum_of((b * inverse, a_dot), (-a * inverse, b_dot))
    dtype = torch.result_type(primal_of(input), primal_of(other))
    return Dual.join(torch.atan2(a, b), tangent).to(dtype)


# -- products of many


@rule("cumprod", kind="product")
def cumprod(input: Any, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """By doubling: no division by an entry that may be small or 0."""
    out = _product_dtype(torch.cumprod, input, dtype)
    x = widened(input if dtype is None else input.to(dtype))
    if x.dim() == 0:
        return x.to(out, copy=True)
    x = x.transpose(dim, -1)
    step = 1
    while step < x.shape[-1]:
        x = torch.cat((x[..., :step], x[..., step:] * x[..., :-step]), -1)
        step *= 2
    if x.shape[-1] <= 1:
        x = x.clone()  # not the input itself
    return x.transpose(dim, -1).to(out).contiguous()


@rule("prod", kind="product")
def prod(
    input: Any, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """By halves: no division by an entry that may be small or 0."""
    out = _product_dtype(torch.prod, input, dtype)
    x = widened(input if dtype is None else input.to(dtype))
    if x.dim() == 0:
        return x.to(out, copy=True)
    x = x.flatten() if dim is None else x.transpose(dim, -1)
    if x.shape[-1] == 1:
        x = x.clone()  # not the input itself
    if x.shape[-1] == 0:
        return torch.ones_like(x.sum(-1, keepdim=keepdim)).to(out)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = x[..., :half] * x[..., half : 2 * half]
        x = pairs if x.shape[-1] == 2 * half else torch.cat((pairs, x[..., -1:]), -1)
    if dim is not None:
        x = x.transpose(dim, -1)
        return (x if keepdim else x.squeeze(dim)).to(out).contiguous()
    return x[0].to(out)


def _product_dtype(func: Any, input: Dual, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return func(torch.empty(1, dtype=input.dtype, device=input.device), 0).dtype


# -- running sums


@rule("logcumsumexp", kind="product")
def logcumsumexp_rule(input: Dual, dim: int) -> Dual:
    if input.stack.is_complex():
        raise RuntimeError(
            "stars_fast: logcumsumexp of a complex tensor with a tangent is not stable in torch; "
            "take the logarithm of a cumsum, or split it into modulus and angle"
        )
    if input.stack.dim() == 1:
        shift(dim, input.stack.unsqueeze(1))
        return Dual(dual_logcumsumexp(input.stack.unsqueeze(1)).squeeze(1))
    axis = shift(dim, input.stack)
    scanned = dual_logcumsumexp(input.stack.transpose(axis, -1))
    return Dual(scanned.transpose(axis, -1).contiguous())


# -- losses


def _reduced(losses: Any, reduction: int, func: Callable[..., Tensor], input: Any) -> Any:
    """As torch counts them (0 none, 1 mean, 2 sum), in the dtype of `func` of such an input."""
    dtype = eager_dtype(lambda x: func(x, x, reduction="none"), primal_of(input))
    result = losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()
    return result.to(dtype)


@rule("huber_loss", kind="product", owners=(torch._C._nn,))
def huber_loss(input: Any, target: Any, reduction: int = 1, delta: float = 1.0) -> Any:
    distance = torch.abs(widened(input) - widened(target))
    near = distance.clamp(max=delta)
    losses = 0.5 * near * near + delta * (distance - near)
    return _reduced(losses, reduction, F.huber_loss, input)


def _bounded_log(p: Tensor) -> Tensor:
    """max(log p, -100), with the derivative 0 at 0."""
    zero = p <= 0
    return torch.where(zero, 1.0, p).log().clamp_min(-100.0).masked_fill(zero, -100.0)


@rule("binary_cross_entropy", kind="product", owners=(torch._C._nn,))
def binary_cross_entropy(input: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    """The slope is bounded as in PyTorch's backward: (p - t) / max(p (1 - p), 1e-12)."""
    (p, p_dot), (t, t_dot) = split_pair(widened(input)), split_pair(widened(target))
    slope = (p - t) / (p * (1 - p)).clamp_min(1e-12)
    tangent = _sum_of((slope, p_dot), (_bounded_log(1 - p) - _bounded_log(p), t_dot))
    losses = Dual.join(F.binary_cross_entropy(p, t, reduction="none"), tangent)
    losses = losses if weight is None else losses * weight
    return _reduced(losses, reduction, F.binary_cross_entropy, input)


@rule("soft_margin_loss", kind="product", owners=(torch._C._nn,))
def soft_margin_loss(input: Any, target: Any, reduction: int = 1) -> Any:
    losses = -F.logsigmoid(widened(input) * widened(target))
    return _reduced(losses, reduction, F.soft_margin_loss, input)


@rule("kl_div", kind="product", owners=(torch,))
def kl_div(input: Any, target: Any, reduction: int = 1, *, log_target: bool = False) -> Any:
    x, t = widened(input), widened(target)
    if log_target:
        losses = torch.exp(t) * (t - x)
    else:
        zero = t == 0
        entropy = t * torch.log(t.masked_fill(zero, 1.0))
        losses = entropy.masked_fill(zero, 0.0) - t * x
    return _reduced(losses, reduction, F.kl_div, input)


# -- distances


def _length(difference: Dual, p: float) -> Any:
    """The p-norm over the last dimension. The largest entries of an infinite norm each count in
    full where they tie, as in torch.cdist."""
    if p != math.inf or difference.shape[-1] == 0:
        return torch.linalg.vector_norm(difference, p, dim=-1)
    d, d_dot = difference.stack.unbind(0)
    size = d.abs()
    top = size.amax(-1, keepdim=True)
    chosen = torch.where(size == top, d.sign(), 0.0).detach()
    # One of the largest entries carries the value, all of them its derivatives.
    value = (chosen * (d - d.detach())).sum(-1) + top.squeeze(-1).detach()
    return Dual.join(value, (chosen * d_dot).sum(-1))


@rule("cdist", kind="product")
def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str | None = None) -> Any:
    """The norm of all differences, which are kept: [..., P, R, M] for x1 [..., P, M] and
    x2 [..., R, M]. A product of matrices would lose equal and near rows."""
    x1, x2 = (x.to(eager_dtype(lambda y: torch.cdist(y, y), x, (0, 1))) for x in (x1, x2))
    return _length(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


@rule("pdist", kind="product")
def pdist(input: Any, p: float = 2.0) -> Any:
    rows, columns = torch.triu_indices(input.shape[0], input.shape[0], 1, device=input.device)
    return _length(input[rows] - input[columns], p)


# -- matrices


@rule("cholesky_inverse", kind="product")
def cholesky_inverse(input: Dual, upper: bool = False) -> Any:
    """(L L^T)^-1 = M^T M with M = L^-1. torch 2.13's own tangent is wrong."""
    dtype = eager_dtype(torch.cholesky_inverse, input.stack, (0, 0))
    with no_autocast(input.stack):
        x = input.to(dtype)
        factor = x.triu() if upper else x.tril()
        eye = torch.eye(x.shape[-1], dtype=dtype, device=x.device)
        inverse = torch.linalg.solve_triangular(factor, eye.expand(x.shape), upper=upper)
        turned = inverse.mH if x.is_complex() else inverse.mT
        return inverse @ turned if upper else turned @ inverse


@rule("det", kind="fused", owners=(torch, torch.Tensor, torch.linalg))
def det(input: Any) -> Dual:
    """At matrices of any rank: torch's tangent is wrong at some singular ones."""
    if input.is_complex():
        return jvp(torch.linalg.det, "det", (input,), {})
    return Dual(determinant(input.stack))


# -- pooling


def _root_of_sums(input: Any, pool: Any, p: float, kernel: Any, args: tuple) -> Any:
    """(sum of x^p)^(1 / p) over windows; the derivative is 0 where that is 0, as PyTorch's."""
    sizes = [kernel] if isinstance(kernel, int) else list(kernel)
    if isinstance(kernel, int):
        sizes *= {F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}[pool]
    sums = pool(input.pow(p), kernel, *args) * math.prod(sizes)
    zero = sums == 0
    # masked_fill would give another memory order.
    return torch.where(zero, 0.0, torch.where(zero, 1.0, sums).pow(1 / p))


def _register_lp_pools() -> None:
    for name, pool in (
        ("lp_pool1d", F.avg_pool1d),
        ("lp_pool2d", F.avg_pool2d),
        ("lp_pool3d", F.avg_pool3d),
    ):

        def handler(
            input: Any,
            norm_type: float,
            kernel_size: Any,
            stride: Any = None,
            ceil_mode: bool = False,
            *,
            _pool: Any = pool,
        ) -> Any:
            return _root_of_sums(input, _pool, norm_type, kernel_size, (stride, 0, ceil_mode))

        rule(name, kind="product", owners=(F,))(handler)


_register_lp_pools()
