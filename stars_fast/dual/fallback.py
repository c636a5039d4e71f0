"""Ops without a rule: taken apart, or exact through `torch.func` of that one op, or an error."""

from __future__ import annotations

import threading
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from stars_fast.dual.backward_checks import NoSecondDerivative
from stars_fast.dual.backward_twice import jvp_by_backward
from stars_fast.dual.forward_ad import NoForwardDerivative, jvp
from stars_fast.dual.in_place import assign, check_writable
from stars_fast.dual.registry import LIBRARY_RULES, fallback, report
from stars_fast.dual.tensor import Dual, primal_of

# In-place ops that overwrite with what has no derivative.
_DRAWS = """
    normal_ uniform_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_
""".split()
# In-place ops that change what the tensor is, not what it holds.
_RESHAPING = "resize_ resize_as_ set_ detach_ rename_ as_strided_".split()

# Modules of torch whose functions are written in Python, out of other torch functions.
_COMPOSED = {"torch.nn.functional", "torch.functional"}


def name_of(func: Any) -> str:
    """A readable name of a torch function."""
    resolved = torch.overrides.resolve_name(func)
    name = resolved or getattr(func, "__qualname__", None) or str(func)
    return name.replace("torch.Tensor.", "").replace("torch.", "").removesuffix(".__get__")


@fallback
def answer_unknown(func: Any, args: tuple, kwargs: dict) -> Any:
    """Answer an op that has no rule."""
    name = name_of(func)
    short = getattr(func, "__name__", "").rsplit(".", 1)[-1]
    if kwargs.get("out") is not None:
        raise RuntimeError(f"stars_fast: {name}(out=...) can't receive a tangent; drop `out`")
    _check_opaque(func, name)
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        known = LIBRARY_RULES.get(_library_name(func))
        if known is not None:
            report(name, "stacked")
            return known(*args, **kwargs)
        _check_library_op(func)
        short = func.__name__.partition(".")[0]
        if short.endswith("_"):
            return _inplace_overload(name, short, args, kwargs)
    if short.endswith("_") and not short.endswith("__"):
        return _inplace(func, name, short, args, kwargs)
    if short.startswith("__i") and short.endswith("__"):
        raise RuntimeError(f"stars_fast: no rule for in-place {name}; use the out-of-place form")
    if short == "__set__":
        raise RuntimeError(
            f"stars_fast: setting {name.removesuffix('.__set__')} of a tensor with a tangent"
        )
    if short == "__get__":
        value = func(args[0].stack[0])
        if not isinstance(value, torch.Tensor):
            report(name, "primal")
            return value
    composed = isinstance(func, FunctionType) and func.__module__ in _COMPOSED
    # A function that asks again from a helper comes back here: then it is one op.
    if composed and func not in _opened():
        _opened().append(func)
        try:
            return _body(func)(*args, **kwargs)
        finally:
            _opened().pop()
    report(name, "fallback")
    try:
        return jvp(func, name, args, kwargs)
    except NoForwardDerivative as error:
        try:
            return jvp_by_backward(func, name, args, kwargs)
        except NoSecondDerivative:
            raise error from None


_local = threading.local()


def _opened() -> list[Any]:
    """The composed functions that this thread is inside of."""
    if not hasattr(_local, "opened"):
        _local.opened = []
    return _local.opened


def _body(func: FunctionType) -> FunctionType:
    """A torch function written in Python, without its own question for `__torch_function__`: run on
    Duals it falls apart into the ops that it is made of, each with its own rule. Made anew for each
    call: someone may replace the functions that it calls."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = func.__globals__ | dict.fromkeys(asks, lambda *_: False)
    body = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _check_opaque(func: Any, name: str) -> None:
    """Refuse what no derivative of one op can see into."""
    if isinstance(func, torch._C.ScriptMethod):
        raise RuntimeError(
            f"stars_fast: {name} is a module of TorchScript, whose weights would get no gradient; "
            "use the module that it was scripted or traced from"
        )
    if isinstance(func, torch._ops.HigherOrderOperator):
        raise RuntimeError(
            f"stars_fast: the higher-order op {func} runs functions that a tangent can't follow; "
            "write that part of the block with torch functions"
        )
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed"):
        raise RuntimeError(
            f"stars_fast: the collective {name} writes into its arguments and has no derivative: "
            "the tangent would stay behind; wrap it in a torch.autograd.Function with a `jvp`, or "
            "keep it out of the block"
        )


def _library_name(func: Any) -> str:
    name = func._qualified_op_name if hasattr(func, "_qualified_op_name") else func.name()
    return name.partition(".")[0]


def _check_library_op(func: Any) -> None:
    """An op of `torch.library` answers torch.func.jvp with silent zeros: never ask it."""
    schema = _library_name(func)
    if schema.split("::")[0] not in ("aten", "prims"):
        raise RuntimeError(
            f"stars_fast: the custom op {schema} has no forward derivative; wrap it in a "
            "torch.autograd.Function with a `jvp`, or write the block with torch functions"
        )


def _inplace_overload(name: str, short: str, args: tuple, kwargs: dict) -> Any:
    """torch.ops.aten.add_.Tensor as Tensor.add_."""
    method = getattr(torch.Tensor, short, None)
    if method is None:
        raise RuntimeError(f"stars_fast: no rule for in-place {name}; use the out-of-place form")
    return method(*args, **kwargs)


def _inplace(func: Any, name: str, short: str, args: tuple, kwargs: dict) -> Any:
    owners = (torch.Tensor, torch, torch.nn.functional)
    forms = (getattr(owner, short[:-1], None) for owner in owners)
    out_of_place = next(filter(callable, forms), None)
    draws = short in _DRAWS
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    known = draws or out_of_place is not None
    if short in _RESHAPING or not known or not args or not isinstance(args[0], torch.Tensor):
        raise RuntimeError(f"stars_fast: no rule for in-place {name}; use the out-of-place form")
    target: Any = args[0]
    if out_of_place is None or draws:
        return _draw(func, name, target, args[1:], kwargs)
    check_writable(name, target)
    report(name, "fallback")
    return assign(name, target, out_of_place(Dual(target.stack.clone()), *args[1:], **kwargs))


def _draw(func: Any, name: str, target: Any, args: tuple, kwargs: dict) -> Any:
    """Overwrite a tensor by a draw, which has no derivative by what it is drawn from."""
    args, kwargs = tree_map(primal_of, (args, kwargs))
    if type(target) is not Dual:
        return func(target, *args, **kwargs)
    check_writable(name, target)
    report(name, "fallback")
    func(target.stack[0], *args, **kwargs)
    target.stack[1].zero_()
    return target
