"""The ops as models call them: a `Tensor` gives a `Tensor`, a `Dual` gives a `Dual`.

Here a stack is taken out of a pair and put back in, and `explain` is told which op ran; below, in
`stars_fast.ops`, there are only stacks. A block that is written with these functions is written
once, and a native model is.

Shapes: B batch, H heads, S tokens, D width. Where an argument may carry a tangent, tensors and
pairs mix: what is a plain tensor has a tangent of zero.

The ops have a first derivative alone: `create_graph=True` through one, for tensors too, is an error
that names it. `fused_jvp` and `fused_jsrr` need none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast import ops
from stars_fast.dual.layout import stack_pair
from stars_fast.dual.registry import report
from stars_fast.dual.tensor import Dual, pair_of
from stars_fast.ops.low_weights import LowWeights
from stars_fast.ops.spans import Spans

Op = TypeVar("Op", bound=Callable[..., Any])


def _on_pairs(carriers: int, kind: str = "fused", by_rules: bool = False) -> Callable[[Op], Op]:
    """Decorator: a function of stacks that also takes pairs.

    Args:
        carriers: how many of the first arguments may carry a tangent.
        kind: the word for it in `explain`.
        by_rules: whether the function, called with pairs, is made of torch's own ops; then a pair
            may also stand elsewhere, and each of those ops answers by its rule.

    The function has a last keyword `dual`, which callers leave alone: whether the carriers are
    stacks [2, ...].
    """

    def decorate(function: Op) -> Op:
        name = function.__name__
        names = list(inspect.signature(function).parameters)
        first = names[:carriers]

        def with_care(args: tuple[Any, ...], options: dict) -> Any:
            """A call that is not only pairs, or only tensors, in the first places."""
            named = [options.pop(each) for each in first[len(args) :] if each in options]
            args = (*args, *named)
            if len(args) < carriers:
                raise TypeError(f"{name}: expected {', '.join(first)}, got {len(args)} of them")
            for key, x in zip(first, args, strict=False):
                if not isinstance(x, Tensor):
                    raise TypeError(
                        f"{name}: {key}: expected a Tensor or a Dual, got {type(x).__name__}"
                    )
            others = zip(names[carriers:], args[carriers:], strict=False)
            for key, x in (*others, *options.items()):
                if type(x) is Dual:
                    if by_rules:
                        return function(*args, **options)
                    raise TypeError(f"{name}: {key}: expected a plain Tensor, got a Dual")
            given, rest = args[:carriers], args[carriers:]
            if Dual not in map(type, given):
                return function(*args, **options)
            report(name, kind)
            stacks = [x.stack if type(x) is Dual else _without_tangent(x) for x in given]
            out = function(*stacks, *rest, dual=True, **options)
            return pair_of(out) if type(out) is not tuple else tuple(map(pair_of, out))

        @wraps(function)
        def of_one(x: Any, *rest: Any, **options: Any) -> Any:
            if options or Dual in map(type, rest) or not isinstance(x, Tensor):
                return with_care((x, *rest), options)
            if type(x) is not Dual:
                return function(x, *rest)
            report(name, kind)
            out = function(x.stack, *rest, dual=True)
            return pair_of(out) if type(out) is not tuple else tuple(map(pair_of, out))

        @wraps(function)
        def of_several(*args: Any, **options: Any) -> Any:
            tensors = [x for x in args[:carriers] if isinstance(x, Tensor)]
            stacks = [x.stack for x in tensors if type(x) is Dual]
            others = *args[carriers:], *options.values()
            if (
                len(tensors) != carriers
                or len(stacks) not in (0, carriers)
                or Dual in map(type, others)
            ):
                return with_care(args, options)
            if not stacks:
                return function(*args, **options)
            report(name, kind)
            out = function(*stacks, *args[carriers:], dual=True, **options)
            return pair_of(out) if type(out) is not tuple else tuple(map(pair_of, out))

        return of_one if carriers == 1 else of_several  # type: ignore[return-value]

    return decorate


def _without_tangent(x: Tensor) -> Tensor:
    return stack_pair(x, torch.zeros_like(x))


@_on_pairs(1)
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    dual: bool = False,
) -> Tensor:
    """RMSNorm over the last dimension, x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: [..., D], Tensor or Dual.
        weight: [D] or None.
        eps: added to the mean square.
        dtype: of the result; x's by default.

    Returns:
        x's kind and shape; statistics are in fp32 for 16-bit inputs.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape, named.
    """
    return ops.rms_norm(x, weight, eps, dtype, dual=dual)


@_on_pairs(1)
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, dual: bool = False
) -> Tensor:
    """LayerNorm over the last dimension.

    Args:
        x: [..., D], Tensor or Dual.
        weight, bias: [D] or None.
        eps: added to the variance.

    Returns:
        x's kind, shape and dtype; statistics are in fp32 for 16-bit inputs.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape, named.
    """
    return ops.layer_norm(x, weight, bias, eps, dual=dual)


@_on_pairs(2)
def sandwich(
    branch: Tensor,
    residual: Tensor,
    weight_out: Tensor | None,
    weight_in: Tensor,
    eps_out: float,
    eps_in: float,
    *,
    dual: bool = False,
) -> tuple[Tensor, Tensor]:
    """h = residual + RMSNorm(branch) and RMSNorm(h), in one pass over memory.

    Args:
        branch: [..., D], Tensor or Dual: the output of a sub-layer; cast to residual's dtype.
        residual: [..., D], Tensor or Dual.
        weight_out: [D], of the norm on the branch; None for no norm there.
        weight_in: [D], of the norm on the sum.
        eps_out, eps_in: of the two norms.

    Returns:
        h, and the normed input of the next sub-layer, both of residual's shape and dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape, named.
    """
    branch = branch.to(residual.dtype)
    return ops.sandwich(branch, residual, weight_out, weight_in, eps_out, eps_in, dual=dual)


@_on_pairs(2, "stacked")
def add(x: Tensor, y: Tensor, *, dual: bool = False) -> Tensor:
    """x + y, of tensors or pairs of one shape.

    Raises:
        ValueError: the shapes differ.
    """
    if x.shape != y.shape:
        shapes = (list(each.shape[1:] if dual else each.shape) for each in (x, y))
        raise ValueError("add: y: expected x's shape {}, got {}".format(*shapes))
    return x + y


@_on_pairs(1, "stacked", by_rules=True)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dual: bool = False) -> Tensor:
    """x W^T + bias.

    Args:
        x: [..., D], Tensor or Dual.
        weight: [E, D].
        bias: [E] or None.

    Returns:
        [..., E], of x's kind.
    """
    return _linear(x, weight, bias, dual)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dual: bool) -> Tensor:
    """A bias is added to the primal alone."""
    if not dual or bias is None:
        return F.linear(x, weight, bias)
    return ops.add_bias(F.linear(x, weight), bias)


@_on_pairs(1, "stacked")
def low_linear(x: Tensor, low: LowWeights, *, dual: bool = False) -> Tensor:
    """x W^T + bias through the 16-bit copy of W, whose gradient is added up in fp32.

    Args:
        x: [..., D], Tensor or Dual; cast to the copy's dtype.
        low: the copy of one weight [E, D].

    Returns:
        [..., E], of x's kind, in the copy's dtype.

    Raises:
        ValueError: the last dimension of x is not D.
    """
    return ops.low_linear(x, low, dual=dual)


@_on_pairs(1)
def low_gated(x: Tensor, low: LowWeights, activation: str, *, dual: bool = False) -> Tensor:
    """f(x G^T) * (x U^T) through one copy of G and U, each [E, D]: `gated` of `low_linear`.

    On CUDA the two are one product; its halves are read where they lie.

    Args:
        x: [..., D], Tensor or Dual; cast to the copy's dtype.
        low: the copy, of gate and up.
        activation: a key of `ops.pointwise.DERIVATIVES`.

    Returns:
        [..., E], of x's kind, in the copy's dtype.

    Raises:
        ValueError: the last dimension of x is not D.
    """
    g, u = ops.low_linears(x, low, 2 if x.is_cuda else 1, dual=dual)
    return ops.gated(g, u, activation, dual=dual)


@_on_pairs(1, "stacked")
def low_heads(
    x: Tensor, low: LowWeights, width: int, tables: tuple[Tensor, Tensor], *, dual: bool = False
) -> tuple[Tensor, ...]:
    """Queries, keys and values of x through one copy: `linear_heads` of each, the first two turned.

    On CUDA queries and keys are one product, which is gone once they are turned; values are kept,
    and have memory of their own.

    Args:
        x: [B, S, D], Tensor or Dual; cast to the copy's dtype.
        low: the copy, of the three maps.
        width: of a head.
        tables: cos and sin of `rotary`.

    Returns:
        q [B, H, S, width], k and v [B, Hkv, S, width], of x's kind.

    Raises:
        ValueError: the shapes do not fit together.
    """
    q, k, v = ops.low_linears(x, low, 2 if x.is_cuda else 1, dual=dual)
    if dual:
        report("rotary", "fused")
    q, k = (ops.rotary(_heads(each, width), *tables) for each in (q, k))
    return q, k, _heads(v, width)


@_on_pairs(2)
def gated(g: Tensor, u: Tensor, activation: str = "silu", *, dual: bool = False) -> Tensor:
    """f(g) * u.

    Args:
        g: [..., D], Tensor or Dual; goes through the activation.
        u: g's shape and dtype.
        activation: a key of `ops.pointwise.DERIVATIVES`.

    Returns:
        g's kind, shape and dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape or name.
    """
    return ops.gated(g, u, activation, dual=dual)


@_on_pairs(1, by_rules=True)
def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str = "silu",
    *,
    dual: bool = False,
) -> Tensor:
    """(f(x G^T) * (x U^T)) D^T, a gated MLP without biases.

    Args:
        x: [..., D], Tensor or Dual.
        gate, up: G and U, [E, D].
        down: [D', E].
        activation: a key of `ops.pointwise.DERIVATIVES`.

    Returns:
        [..., D'], of x's kind.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape or name.
    """
    g, u = F.linear(x, gate), F.linear(x, up)
    inner = ops.gated(g, u, activation, dual=True) if dual else gated(g, u, activation)
    return F.linear(inner, down)


@_on_pairs(1)
def pointwise(x: Tensor, activation: str, *, dual: bool = False) -> Tensor:
    """f(x), elementwise.

    Args:
        x: Tensor or Dual of any shape.
        activation: a key of `ops.pointwise.DERIVATIVES`.

    Returns:
        x's kind, shape and dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or name.
    """
    return ops.pointwise(x, activation, dual=dual)


@_on_pairs(1)
def softmax(x: Tensor, *, dual: bool = False) -> Tensor:
    """Softmax over the last dimension of x [..., D], Tensor or Dual; x's kind and shape.

    Raises:
        TypeError, ValueError: x has the wrong dtype or shape.
    """
    return ops.softmax(x, dual=dual)


def _heads(x: Tensor, width: int) -> Tensor:
    shape = x.shape
    return x.reshape(*shape[:-1], shape[-1] // width, width).transpose(-3, -2)


@_on_pairs(1, "stacked")
def split_heads(x: Tensor, width: int, *, dual: bool = False) -> Tensor:
    """[B, S, H * width] -> [B, H, S, width], a view; x is a Tensor or a Dual."""
    return _heads(x, width)


@_on_pairs(1, "stacked")
def pairs_to_halves(x: Tensor, *, dual: bool = False) -> Tensor:
    """x [..., D], D even, in another order: entries 0, 2, 4, ..., then 1, 3, 5, ...

    It brings heads whose neighbouring entries belong together into the order of `rotary`, where
    those D / 2 apart do. Of x's kind.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@_on_pairs(1, "stacked", by_rules=True)
def linear_heads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    width: int,
    tables: tuple[Tensor, Tensor] | None = None,
    *,
    dual: bool = False,
) -> Tensor:
    """`split_heads(linear(x, weight, bias), width)`, and `rotary` of it where tables are given.

    Args:
        x: [B, S, D], Tensor or Dual.
        weight: [H * width, D].
        bias: [H * width] or None.
        width: of a head.
        tables: cos and sin of `rotary`.

    Returns:
        [B, H, S, width], of x's kind.

    Raises:
        ValueError: the shapes do not fit together.
    """
    y = _heads(_linear(x, weight, bias, dual), width)
    if tables is None:
        return y
    if not dual:
        return rotary(y, *tables)
    report("rotary", "fused")
    return ops.rotary(y, *tables)


@_on_pairs(1, "stacked", by_rules=True)
def linear_of_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dual: bool = False
) -> Tensor:
    """`linear(merge_heads(x), weight, bias)`: [B, H, S, D] -> [B, S, E], of x's kind."""
    return _linear(x.transpose(-3, -2).flatten(-2), weight, bias, dual)


@_on_pairs(1, "stacked")
def merge_heads(x: Tensor, *, dual: bool = False) -> Tensor:
    """[B, H, S, D] -> [B, S, H * D]; x is a Tensor or a Dual."""
    return x.transpose(-3, -2).flatten(-2)


@_on_pairs(1)
def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, dual: bool = False) -> Tensor:
    """x cos + rotate_half(x) sin: queries or keys, turned by their positions.

    Args:
        x: [B, H, S, D], Tensor or Dual, D even.
        cos, sin: [B or 1, S, D]; they get no gradient.

    Returns:
        x's kind, shape and dtype.

    Raises:
        ValueError: the shapes do not fit together.
    """
    return ops.rotary(x, cos, sin)


@_on_pairs(3, by_rules=True)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    *,
    spans: Spans | None = None,
    dual: bool = False,
) -> Tensor:
    """Scaled-dot-product attention: the dual kernel for pairs, PyTorch's own for tensors.

    Args:
        q: [B, H, Sq, D], Tensor or Dual.
        k, v: [B, Hkv, Sk, D], H a multiple of Hkv.
        mask: broadcastable to [B, H, Sq, Sk]; boolean (True = attend) or added to the logits. One
            that wants a gradient, or carries a tangent, takes torch's ops one by one.
        causal: keep key j for query i where j <= i.
        scale: of the logits; D^-1/2 by default.
        spans: the interval of keys of each query, instead of `mask` and `causal`.

    Returns:
        [B, H, Sq, D], of q's kind and dtype. Rows that see no key are 0 in pairs; in tensors they
        are as PyTorch has them.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape, or `spans` with `mask` or
            `causal`.
    """
    if spans is not None and (mask is not None or causal):
        raise ValueError("attention: spans: expected None when mask or causal is given")
    if not dual:
        return _torchs_attention(q, k, v, mask, causal, scale, spans)
    if mask is not None and mask.requires_grad:  # the fused kernel has no gradient for it
        pairs = pair_of(q), pair_of(k), pair_of(v)
        return _torchs_attention(*pairs, mask, causal, scale, spans).stack  # type: ignore[attr-defined]
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return ops.attention(q, k, v, mask, causal, scale, spans=spans)


def _torchs_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    spans: Spans | None,
) -> Tensor:
    """`attention` by torch's own op, of tensors or pairs."""
    if spans is not None:
        key = torch.arange(k.shape[-2], device=q.device)
        first, stop = spans.queries[:, None].unsqueeze(-2).unbind(-1)
        mask = (first <= key) & (key < stop)
    elif causal and mask is not None:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        is_boolean = mask.dtype == torch.bool
        mask = mask & seen if is_boolean else mask.masked_fill(~seen, -torch.inf)
        causal = False
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
