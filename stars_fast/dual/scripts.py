"""Functions of `torch.jit.script` in a pass.

Their interpreter does not ask for `__torch_function__`: on a Dual it would run below the rules. So
the Python code that they were made of runs in their place, with arguments as the interpreter makes
them. The first call of each holds its result against the interpreter's.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.tensor import Dual, primal_of

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Relative difference up to which two results are the same but for rounding; 0.05 in 16 bits."""

_NUMBERS: dict[str, Callable[[Any], Any]] = {"FloatType": float, "IntType": int, "BoolType": bool}

_same: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions whose code gave what they give."""


def call_script(interpret: Callable[..., Any], script: Any, args: tuple, kwargs: dict) -> Any:
    """A call of the ScriptFunction `script` in a pass.

    Args:
        interpret: runs a function of TorchScript, `interpret(script, *args, **kwargs)`.

    Raises:
        RuntimeError: the tangent can't be followed, or the function and its code differ.
    """
    if not _has_pair((*args, *kwargs.values())):
        return _named(interpret, script, args, kwargs)
    code = _code_of(script)
    declared = script.schema.arguments
    given = [_as_declared(script, x, a.type) for x, a in zip(args, declared, strict=False)]
    types = {a.name: a.type for a in declared}
    named = {
        name: _as_declared(script, x, types[name]) if name in types else x
        for name, x in kwargs.items()
    }
    if script not in _same:
        _check_same(interpret, script, code, (given, named))
        _same.add(script)
    return code(*given, *args[len(given) :], **named)


def _has_pair(values: Iterable[Any]) -> bool:
    """Whether a Dual is among arguments, or in a list or dictionary of them."""
    for value in values:
        inside = value.values() if isinstance(value, dict) else value
        if type(value) is Dual or (isinstance(value, (list, tuple, dict)) and _has_pair(inside)):
            return True
    return False


def _named(interpret: Callable[..., Any], script: Any, args: tuple, kwargs: dict) -> Any:
    """The interpreter's result; a Dual that it met has an error without words."""
    try:
        return interpret(script, *args, **kwargs)
    except RuntimeError as error:
        if not str(error).rstrip().endswith("RuntimeError:"):
            raise
        raise RuntimeError(
            f"stars_fast: {script.name} of TorchScript failed, as it does on a tensor with a "
            "tangent that comes in an object or a transform of torch.func; use the function that "
            "it was made of"
        ) from error


def _code_of(script: Any) -> Callable[..., Any]:
    # torch notes the code for torch.compile, and what was scripted from which code. What a traced
    # function does may differ from its code for other inputs; one that was loaded has none; of a
    # decorated one the interpreter has the code inside alone.
    code: Any = getattr(script, "_torchdynamo_inline", None)
    known = None if code is None else torch.jit._state._try_get_jit_cached_function(code)
    if known is None or known.qualified_name != script.qualified_name:
        raise RuntimeError(
            f"stars_fast: {script.name} is a traced or loaded function of TorchScript, which no "
            "tangent can follow; use the function that it was made of"
        )
    if inspect.unwrap(code) is not code:
        raise RuntimeError(
            f"stars_fast: {script.name} is a function of TorchScript with a decorator, which "
            "TorchScript leaves out; script the function without it"
        )
    return code


def _as_declared(script: Any, value: Any, kind: Any) -> Any:
    """An argument as the interpreter makes it: containers are copies, numbers of the type that the
    function declares."""
    name = kind.kind()
    if name == "OptionalType":
        return None if value is None else _as_declared(script, value, kind.getElementType())
    if name == "ListType":
        return [_as_declared(script, x, kind.getElementType()) for x in value]
    if name == "DictType":
        return {k: _as_declared(script, x, kind.getValueType()) for k, x in value.items()}
    if name == "TupleType" and type(value) is tuple:
        pairs = zip(value, kind.elements(), strict=True)
        return tuple(_as_declared(script, x, each) for x, each in pairs)
    if name in _NUMBERS:
        if type(value) is Dual:
            raise RuntimeError(
                f"stars_fast: {script.name} of TorchScript takes a number where it was given a "
                "tensor with a tangent, which would be lost; declare a tensor there"
            )
        return _NUMBERS[name](value)
    return value


def _check_same(
    interpret: Callable[..., Any], script: Any, code: Callable[..., Any], given: tuple
) -> None:
    """Refuse a function whose code does something else now than what was scripted, as after a
    change of a name that it reads, or where it asks `torch.jit.is_scripting`."""
    devices = {x.device.index for x in _leaves(given) if x.device.type == "cuda"}
    results = []
    for run in (lambda *a, **k: interpret(script, *a, **k), code):
        args, kwargs = _plain(given)
        with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
            results.append(_leaves(run(*args, **kwargs)))
    if len(results[0]) != len(results[1]) or not all(map(_close, *results)):
        raise RuntimeError(
            f"stars_fast: {script.name} of TorchScript gives another result than the Python code "
            "that it was made of, which a pass runs; use that code, or script it as it is now"
        )


def _plain(value: Any) -> Any:
    """Arguments with fresh tensors, of Duals their primals."""
    if isinstance(value, Tensor):
        return primal_of(value).detach().clone()
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _leaves(value: Any) -> list[Tensor]:
    """The tensors and numbers of a result, as tensors."""
    if isinstance(value, (dict, list, tuple)):
        inside = value.values() if isinstance(value, dict) else value
        return [leaf for x in inside for leaf in _leaves(x)]
    if isinstance(value, (Tensor, int, float, complex)):
        return [primal_of(value) if isinstance(value, Tensor) else torch.tensor(value)]
    return []


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = _TOLERANCE.get(one.dtype, 0.05)
    size = float(other.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * size, equal_nan=True)
