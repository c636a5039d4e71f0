"""Rules of torch.nn.functional: linear, activations, softmax, norms, attention."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from stars_fast import ops
from stars_fast.dual.forward_ad import jvp
from stars_fast.dual.in_place import assign, in_place_form
from stars_fast.dual.layout import (
    in_eager,
    in_memory_order,
    in_order,
    is_channels_last,
    order_of,
)
from stars_fast.dual.precision import widened
from stars_fast.dual.registry import add_rule
from stars_fast.dual.rule import rule
from stars_fast.dual.rules.shapes import shift
from stars_fast.dual.tensor import UNDERSTOOD, Dual, primal_of
from stars_fast.ops.elementwise import elementwise
from stars_fast.ops.log_softmax import log_softmax as dual_log_softmax
from stars_fast.ops.precision import no_autocast, widen


def eager_dtype(func: Any, x: Tensor, shape: tuple[int, ...] = (0,)) -> torch.dtype:
    """The dtype that `func` gives for a tensor like x under autocast: asked with no elements."""
    if not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return func(torch.empty(shape, dtype=x.dtype, device=x.device)).dtype


@rule("linear", kind="stacked")
def linear_rule(input: Any, weight: Any, bias: Any = None) -> Any:
    if type(weight) is Dual or type(bias) is Dual or type(input) is not Dual:
        y = torch.matmul(input, weight.mT if weight.dim() > 1 else weight)
        return y if bias is None else y + bias.to(y.dtype)
    y = F.linear(input.stack, weight)
    return Dual(y if bias is None else ops.add_bias(y, bias))


# -- elementwise


def _register_pointwise() -> None:
    names = "sigmoid tanh exp log sqrt rsqrt reciprocal square sin cos erf abs"
    for name in names.split():
        func = getattr(torch, name)

        def handler(input: Dual, *, _func: Any = func, _name: str = name) -> Dual:
            dtype = eager_dtype(_func, input.stack)
            return Dual(in_memory_order(lambda x: ops.pointwise(x, _name, dtype), input.stack))

        add_rule(name, "fused", handler)
        add_rule(f"{name}_", "in-place", in_place_form(f"{name}_", handler), real=True)


_register_pointwise()


def _register_activation(name: str) -> None:
    def handler(input: Dual, inplace: bool = False) -> Dual:
        stack = input.stack.clone() if inplace else input.stack
        result = Dual(in_memory_order(lambda x: ops.pointwise(x, name), stack))
        return assign(name, input, result) if inplace else result

    add_rule(name, "fused", handler)
    add_rule(f"{name}_", "in-place", in_place_form(f"{name}_", handler), real=True)


_register_activation("silu")
_register_activation("relu")


def _register_careful(name: str, *names: str) -> None:
    func = getattr(F, name, None) or getattr(torch, name, None) or getattr(torch.special, name)

    def handler(input: Dual, inplace: bool = False) -> Dual:
        stack = input.stack.clone() if inplace else input.stack
        dtype = eager_dtype(func, stack)
        result = Dual(in_memory_order(lambda x: elementwise(x, name, dtype), stack))
        return assign(name, input, result) if inplace else result

    for each in (name, *names):
        add_rule(name, "fused", handler, each)
        add_rule(f"{each}_", "in-place", in_place_form(f"{each}_", handler), real=True)


for _names in (
    ("mish",),
    ("hardsigmoid",),
    ("sinc",),
    ("i1",),
    ("i1e",),
    ("log_ndtr",),
    ("asin", "arcsin"),
    ("acos", "arccos"),
    ("acosh", "arccosh"),
    ("atanh", "arctanh"),
):
    _register_careful(*_names)


@rule("gelu", kind="fused")
def gelu(input: Dual, *, approximate: str = "none") -> Dual:
    name = "gelu" if approximate == "none" else "gelu_tanh"
    return Dual(in_memory_order(lambda x: ops.pointwise(x, name), input.stack))


@rule("glu", kind="product", owners=(F,))
def glu(input: Dual, dim: int = -1) -> Any:
    """a sigmoid(b) of the halves a and b."""
    if input.dim() == 0 or input.shape[dim] % 2:
        raise RuntimeError(
            f"glu: input: expected an even size along dim={dim}, got shape {list(input.shape)}"
        )
    a, b = widened(input).chunk(2, dim)
    return (a * torch.sigmoid(b)).to(input.dtype)


@rule("dropout", kind="stacked")
def dropout(input: Dual, p: float = 0.5, training: bool = True, inplace: bool = False) -> Dual:
    """One mask for both halves, drawn as for an ordinary tensor."""
    if not training or p == 0.0:
        return input
    keep = F.dropout(torch.ones_like(input.stack[0]), p, True)
    result = Dual(input.stack * keep)
    return assign("dropout", input, result) if inplace else result


# -- softmax


def _default_dim(input: Dual) -> int:
    """The dimension of a softmax that names none, as torch.nn.functional chooses it."""
    return 0 if input.dim() in (0, 1, 3) else 1


@rule("softmax", kind="fused")
def softmax_rule(
    input: Dual, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Dual:
    if isinstance(_stacklevel, torch.dtype):  # Tensor.softmax(dim, dtype)
        dtype = _stacklevel
    if dtype is None:
        dtype = eager_dtype(lambda x: torch.softmax(x, -1), input.stack, (0, 1))
    if dim is None:
        dim = _default_dim(input)
    if input.stack.dim() == 1:
        return jvp(torch.softmax, "softmax", (input, dim), {"dtype": dtype})
    axis = shift(dim, input.stack)
    last = dim in (-1, input.stack.dim() - 2)
    result = ops.softmax(input.stack if last else input.stack.transpose(axis, -1), dtype)
    return Dual(result if last else result.transpose(axis, -1).contiguous())


@rule("log_softmax", kind="fused")
def log_softmax_rule(
    input: Dual, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Dual:
    if isinstance(_stacklevel, torch.dtype):
        dtype = _stacklevel
    if dtype is None:
        dtype = eager_dtype(lambda x: torch.log_softmax(x, -1), input.stack, (0, 1))
    if dim is None:
        dim = _default_dim(input)
    if input.stack.dim() == 1:
        return jvp(torch.log_softmax, "log_softmax", (input, dim), {"dtype": dtype})
    axis = shift(dim, input.stack)
    last = dim in (-1, input.stack.dim() - 2)
    result = dual_log_softmax(input.stack if last else input.stack.transpose(axis, -1), dtype)
    return Dual(result if last else result.transpose(axis, -1).contiguous())


# -- norms


def _sizes(normalized_shape: Any) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


def _standardise(x: Any, dims: tuple[int, ...], eps: float) -> Any:
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _flat_norm_input(input: Dual, normalized_shape: Any) -> tuple[Tensor, int]:
    shape = _sizes(normalized_shape)
    if list(input.stack.shape[-len(shape) :]) != shape:
        raise RuntimeError(
            f"norm: input must end in normalized_shape {shape}, got {list(input.shape)}"
        )
    width = math.prod(shape)
    lead = input.stack.shape[: input.stack.dim() - len(shape)]
    return input.stack.reshape(*lead, width), width


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.reshape(-1)


@rule("layer_norm", kind="fused")
def layer_norm_rule(
    input: Dual,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if type(input) is not Dual or type(weight) is Dual or type(bias) is Dual:
        dims = tuple(range(-len(_sizes(normalized_shape)), 0))
        x, dtype = widened(input), input.dtype
        return _affine(_standardise(x, dims, eps), widened(weight), widened(bias)).to(dtype)
    stack, width = _flat_norm_input(input, normalized_shape)
    weight, bias = _flat(weight), _flat(bias)
    dtype = eager_dtype(lambda x: F.layer_norm(x, (width,), weight, bias), stack, (0, width))
    return Dual(ops.layer_norm(stack, weight, bias, eps, dtype).view(input.stack.shape))


@rule("rms_norm", kind="fused")
def rms_norm_rule(
    input: Dual, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    if eps is None:  # as torch: of the dtype that it computes in
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        eps = torch.finfo(wide).eps
    if type(input) is not Dual or type(weight) is Dual:
        dims = tuple(range(-len(_sizes(normalized_shape)), 0))
        x = widened(input)
        y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
        return _affine(y, widened(weight), None).to(input.dtype)
    stack, width = _flat_norm_input(input, normalized_shape)
    weight = _flat(weight)
    dtype = eager_dtype(lambda x: F.rms_norm(x, (width,), weight), stack, (0, width))
    y = ops.rms_norm(stack, weight, eps, dtype).view(input.stack.shape)
    return Dual(_in_format_of(y, input.stack))


def _by_channel(parameter: Any, ndim: int) -> Any:
    """[C] to broadcast over [N, C, ...]."""
    return None if parameter is None else parameter.reshape(-1, *[1] * (ndim - 2))


def _standardise_groups(input: Dual, shape: tuple[int, ...], eps: float) -> Dual:
    """Input standardised over what follows the first dimensions `shape`; fp32 for 16 bits."""
    stack = widen(input.stack)
    flat = stack.reshape(2, *shape, math.prod(stack.shape[1:]) // max(math.prod(shape), 1))
    return Dual(ops.layer_norm(flat, None, None, eps).view(stack.shape))


def _in_format_of(stack: Tensor, like: Tensor) -> Tensor:
    """A stack in memory as another of its shape, where torch takes that for channels last."""
    last = (0, *range(2, like.dim() - 1), 1)
    return in_order(stack, last if is_channels_last(like.shape[1:], like.stride()[1:]) else None)


@rule("group_norm", kind="fused")
def group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if type(input) is not Dual:
        input = Dual.join(input, torch.zeros_like(input))
    if input.dim() < 2 or num_groups < 1 or input.shape[1] % num_groups:
        raise RuntimeError(
            f"group_norm: input: expected [N, C, ...] with C a multiple of "
            f"num_groups={num_groups}, got shape {list(input.shape)}"
        )
    dtype = eager_dtype(lambda x: F.group_norm(x, 1), input.stack, (1, 2, 1))
    y = _standardise_groups(input, (input.shape[0], num_groups), eps)
    weight, bias = (_by_channel(widened(each), input.dim()) for each in (weight, bias))
    y = _affine(y, weight, bias)
    return Dual(_in_format_of(y.stack.to(dtype), input.stack))


def _check_statistics(name: str, **statistics: Any) -> None:
    """Refuse running statistics with a tangent: torch takes no derivative by them."""
    for each, value in statistics.items():
        if type(value) is Dual:
            raise RuntimeError(
                f"{name}: {each}: expected a tensor without a tangent, got one that depends on h, "
                "which under no_grad it does too; detach() it, or write the norm out where the "
                "statistics are meant to move with h"
            )


@rule("instance_norm", kind="fused", owners=(F,))
def instance_norm(
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Running statistics are updated once, by torch's own forward of the primal."""
    _check_statistics("instance_norm", running_mean=running_mean, running_var=running_var)
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    primal = primal_of(input).detach()
    with torch.no_grad():
        plain = F.instance_norm(primal, running_mean, running_var, None, None, True, momentum, eps)
    if type(input) is not Dual:
        input = Dual.join(input, torch.zeros_like(input))
    y = _standardise_groups(input, tuple(input.shape[:2]), eps)
    weight, bias = (_by_channel(widened(each), input.dim()) for each in (weight, bias))
    return _affine(y, weight, bias).to(plain.dtype)


@rule("batch_norm", kind="fallback", owners=(F,))
def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training:
        raise RuntimeError(
            "stars_fast: batch_norm in training mode mixes the samples, whose Jacobians are then "
            "not their own, and updates its statistics in place; call eval() on it, and let it "
            "track its running statistics"
        )
    _check_statistics("batch_norm", running_mean=running_mean, running_var=running_var)
    args = (input, running_mean, running_var, weight, bias, False, momentum, eps)
    return jvp(F.batch_norm, "batch_norm", args, {})


# -- attention


def _as_factor(x: Any) -> Any:
    """x in the dtype in which eager multiplies it with a matrix: under autocast that of 16 bits, of
    fp64 its own."""
    return x.to(eager_dtype(lambda x: x @ x.mT, x, (0, 1)))


def _lift(x: Any) -> Tensor:
    return x.stack if type(x) is Dual else torch.stack((x, torch.zeros_like(x)))


def _unfused_attention(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float, gqa: bool
) -> Any:
    """From the parts, for what the fused op leaves out: dropout, a mask with a gradient or a
    tangent, inputs of unusual rank. Fully masked rows give 0; 16-bit inputs compute in fp32."""
    q, k, v = map(_as_factor, (q, k, v))
    dtype = q.dtype
    if gqa:
        groups = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    with no_autocast(q):
        q, k, v = map(widen, (q, k, v))
        # Half of the scale each, as eager: neither input is kept, so both may be written to.
        root = abs(scale) ** 0.5
        s = (q * math.copysign(root, scale)) @ (k * root).mT
        if mask is not None:
            s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
        if is_causal:
            keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
            s = s.masked_fill(~keep, -torch.inf)
        # Masked before as well as after: the derivatives of a row of -inf are NaN.
        hidden = (s == -torch.inf).all(-1, keepdim=True)
        p = torch.softmax(s.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
        return (F.dropout(p, dropout_p) @ v).to(dtype)


def _is_causal_bias(kind: type) -> bool:
    """Whether a class is torch's CausalBias. Nobody has one whose module is not loaded, and with it
    would come torch's compilers."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and issubclass(kind, module.CausalBias)


def _causal_mask(bias: Any, query: Any, key: Any) -> Tensor:
    """[Sq, Sk], True where a query sees a key: aligned at the first or at the last of both."""
    from torch.nn.attention.bias import CausalVariant

    queries, keys = query.shape[-2], key.shape[-2]
    if (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        raise ValueError(
            f"scaled_dot_product_attention: attn_mask is a CausalBias of {bias.seq_len_q} queries "
            f"and {bias.seq_len_kv} keys, expected {queries} and {keys}"
        )
    last = bias.variant == CausalVariant.LOWER_RIGHT
    everything = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return everything.tril(keys - queries if last else 0)


UNDERSTOOD[F.scaled_dot_product_attention] = _is_causal_bias
# A weight of any class, such as a quantised one, multiplies the stack as it multiplies a tensor.
UNDERSTOOD[F.linear] = lambda kind: True


@rule("scaled_dot_product_attention", kind="fused")
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if _is_causal_bias(type(attn_mask)):
        attn_mask, is_causal = _causal_mask(attn_mask, query, key), False
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: attn_mask: expected None when is_causal is True"
        )
    if scale is None:
        scale = query.shape[-1] ** -0.5
    needs_parts = dropout_p > 0 or query.dim() not in ((4,) if enable_gqa else (3, 4))
    if isinstance(attn_mask, Tensor):
        needs_parts = needs_parts or type(attn_mask) is Dual or attn_mask.requires_grad
    order = _order_of_attention(query, key, value, attn_mask, dropout_p, enable_gqa)
    if needs_parts:
        parts = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        return Dual(in_order(_unfused_attention(*parts).stack, order))
    if not enable_gqa and query.dim() == 4 and 1 != query.shape[1] != key.shape[1] != 1:
        raise RuntimeError(
            f"scaled_dot_product_attention: query has {query.shape[1]} heads and key "
            f"{key.shape[1]}; pass enable_gqa=True for grouped heads"
        )
    q, k, v = (_as_factor(_lift(x)) for x in (query, key, value))
    if query.dim() == 3:
        q, k, v = q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
    # What eager broadcasts; one head of keys for many is a group of heads.
    heads = () if enable_gqa else (2,)
    for dim in (1, *heads):
        sizes = {x.shape[dim] for x in (q, k, v)} - {1}
        if len(sizes) == 1 and not (dim == 2 and k.shape[2] == v.shape[2] == 1):
            q, k, v = (x.expand(*x.shape[:dim], *sizes, *x.shape[dim + 1 :]) for x in (q, k, v))
    out = ops.attention(q, k, v, attn_mask, is_causal, scale)
    out = out.squeeze(2) if query.dim() == 3 else out
    return Dual(in_order(out, order))


# The kernel for CPUs takes three dimensions, and groups of heads of its own accord, from here on.
_TAKES_MORE = TorchVersion(torch.__version__) >= TorchVersion("2.14")


def _order_of_attention(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, gqa: bool
) -> tuple[int, ...] | None:
    """Memory order of eager's result: that of the query where one of its kernels takes the inputs;
    None for the usual order."""
    query, key, value = (in_eager(x.stack) if type(x) is Dual else x for x in (query, key, value))
    fused = (
        all(x.stride(-1) == 1 for x in (query, key, value))
        and (query.dim() == 4 or (query.dim() == 3 and _TAKES_MORE))
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[-3] == value.shape[-3]
        and (query.shape[-3] == key.shape[-3] or gqa or _TAKES_MORE)
        and query.shape[-1] == value.shape[-1]
        and key.shape[-2] > 0
        and dropout_p == 0
        and (mask is None or mask.dim() in (2, query.dim()))
        and not (mask is not None and mask.requires_grad)
    )
    return order_of(query) if fused else None
