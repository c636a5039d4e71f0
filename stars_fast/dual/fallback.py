"""Ops without a rule: exact through `torch.func.jvp` of that one op, or an error that names it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stars_fast.dual.inplace import check_writable
from stars_fast.dual.registry import report
from stars_fast.dual.tensor import Dual

# Views that have no rule on the stack: their result is a copy, so no later write may go through it.
_VIEWS = {"view_as_real", "view_as_complex", "real", "imag", "hsplit", "vsplit"}

# Modules of torch whose functions are written in Python, out of other torch functions.
_COMPOSED = {"torch.nn.functional", "torch.functional"}

# Norms that return the statistics they saved: autograd takes those for constants in the tangent
# (torch 2.13).
_FORGETFUL = {
    "native_layer_norm",
    "native_batch_norm",
    "native_group_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
}


def name_of(func: Any) -> str:
    """A readable name of a torch function."""
    resolved = torch.overrides.resolve_name(func)
    name = resolved or getattr(func, "__qualname__", None) or str(func)
    return name.replace("torch.Tensor.", "").replace("torch.", "").removesuffix(".__get__")


def unknown(func: Any, args: tuple, kwargs: dict) -> Any:
    """Answer an op that has no rule."""
    name = name_of(func)
    short = getattr(func, "__name__", "").rsplit(".", 1)[-1]
    if kwargs.get("out") is not None:
        raise RuntimeError(f"stars_fast: {name}(out=...) can't receive a tangent; drop `out`")
    if short in _FORGETFUL:
        raise RuntimeError(
            f"stars_fast: the gradient of the forward derivative of {name} in torch forgets the path "
            "through the statistics; use the norm of torch.nn.functional"
        )
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        _check_library_op(func)
    if short.endswith("_") and not short.endswith("__"):
        return _inplace(func, name, short, args, kwargs)
    if short.startswith("__i") and short.endswith("__"):
        raise RuntimeError(f"stars_fast: no rule for in-place {name}; use the out-of-place form")
    composed = isinstance(func, FunctionType) and func.__module__ in _COMPOSED
    # A function that asks again from a helper comes back here: then it is one op.
    if composed and func not in _opened():
        _opened().append(func)
        try:
            return _body(func)(*args, **kwargs)
        finally:
            _opened().pop()
    report(name, "fallback")
    result = jvp(func, name, args, kwargs)
    if short in _VIEWS:
        for dual in (*_duals(args), *_duals(result)):
            dual.frozen = name
    return result


_local = threading.local()


def _opened() -> list[Any]:
    """The composed functions that this thread is inside of."""
    if not hasattr(_local, "opened"):
        _local.opened = []
    return _local.opened


@functools.cache
def _body(func: FunctionType) -> FunctionType:
    """A torch function written in Python, without its own question for `__torch_function__`: run on
    Duals it falls apart into the ops that it is made of, each with its own rule."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(asks, lambda *_: False)}
    body = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _duals(tree: Any) -> list[Dual]:
    return [leaf for leaf in tree_flatten(tree)[0] if type(leaf) is Dual]


def _check_library_op(func: Any) -> None:
    """An op of `torch.library` answers torch.func.jvp with silent zeros: never ask it."""
    schema = func._qualified_op_name if hasattr(func, "_qualified_op_name") else func.name()
    if schema.split("::")[0] not in ("aten", "prims"):
        raise RuntimeError(
            f"stars_fast: the custom op {schema} has no forward derivative; wrap it in a "
            "torch.autograd.Function with a `jvp`, or write the block with torch functions"
        )


def _inplace(func: Any, name: str, short: str, args: tuple, kwargs: dict) -> Dual:
    out_of_place = getattr(torch.Tensor, short[:-1], None) or getattr(torch, short[:-1], None)
    if out_of_place is None or not args:
        raise RuntimeError(f"stars_fast: no rule for in-place {name}; use the out-of-place form")
    target = args[0]
    check_writable(name, target)
    report(name, "fallback")
    copy = Dual(target.stack.clone())
    result = out_of_place(copy, *args[1:], **kwargs)
    target.stack.copy_(result.stack)
    return target


def jvp(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """`torch.func.jvp` of one op: floating-point outputs become Duals, others stay plain.

    The weights that the op closes over keep their gradient (reverse over forward).
    """
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if type(leaf) is Dual]
    stacks = [leaves[i].stack for i in places]
    outputs: list[Any] = []
    out_spec: Any = None

    def call(*primals: Tensor) -> None:
        nonlocal outputs, out_spec
        filled = list(leaves)
        for place, primal in zip(places, primals, strict=True):
            filled[place] = primal
        call_args, call_kwargs = tree_unflatten(filled, spec)
        outputs, out_spec = tree_flatten(func(*call_args, **call_kwargs))

    def smooth_and_other(*primals: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        call(*primals)
        smooth = [out for out in outputs if _is_smooth(out)]
        if not smooth:
            raise _ValueOnly
        return smooth, [out for out in outputs if _is_tensor(out) and not _is_smooth(out)]

    primals = tuple(stack[0] for stack in stacks)
    tangents = tuple(stack[1] for stack in stacks)
    try:
        values, derivatives, others = torch.func.jvp(
            smooth_and_other, primals, tangents, strict=True, has_aux=True
        )
    except _ValueOnly:
        call(*primals)
        return tree_unflatten(outputs, out_spec)
    except NotImplementedError as error:
        raise RuntimeError(
            f"stars_fast: {name} has no rule and no forward derivative in torch: {error}"
        ) from error
    except RuntimeError as error:
        if "independent" not in str(error):
            raise
        # What torch.func.jvp would otherwise answer with zeros: an op it can't see through.
        raise RuntimeError(
            f"stars_fast: {name} gives a result without a tangent: torch has no forward derivative "
            "for it; detach its input where a constant is meant"
        ) from error
    _check_gradient(name, stacks, derivatives)
    duals = map(Dual.join, values, derivatives)
    plain = iter(others)
    filled = [
        next(duals) if _is_smooth(out) else next(plain) if _is_tensor(out) else out
        for out in outputs
    ]
    return tree_unflatten(filled, out_spec)


def _check_gradient(name: str, stacks: list[Tensor], tangents: Sequence[Tensor]) -> None:
    """A tangent is linear in the tangents it came from: unless it vanishes, it hangs on them."""
    if not torch.is_grad_enabled() or not any(stack.requires_grad for stack in stacks):
        return
    for tangent in tangents:
        if not tangent.requires_grad and bool(tangent.any()):
            raise RuntimeError(f"stars_fast: {name} has a tangent in torch, but no gradient of it")


class _ValueOnly(Exception):
    """The op has no floating-point output: it is a question about values."""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_smooth(value: Any) -> bool:
    return _is_tensor(value) and (value.is_floating_point() or value.is_complex())
