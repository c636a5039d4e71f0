"""Functions of `torch.jit.script` in a pass.

Their interpreter does not ask for `__torch_function__`: on a Dual it would run below the rules. So
the compiled graph runs here, op by op, each op answered as any other of the block. Ops without side
effects, branches, loops and lists are known; the rest is refused by name: writes into tensors,
calls of Python, random draws but dropout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stars_fast.dual.tensor import Dual, primal_of


def _tensor(data: Any, dtype: Any, device: Any, requires_grad: bool) -> Tensor:
    """torch.tensor as the interpreter has it: it makes the tensor first and casts it then."""
    made = torch.tensor(data, device=device)
    made = made if dtype is None else torch.ops.aten.to.dtype(made, dtype)
    return made.requires_grad_(requires_grad)


def _attention(
    query: Any, key: Any, value: Any, mask: Any, dropout: Any, causal: Any, scale: Any, gqa: Any
) -> Any:
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa
    )


def _changes(change: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a list that changes it, which gives the list."""

    def apply(values: list[Any], *args: Any) -> list[Any]:
        change(values, *args)
        return values

    return apply


def _sort(values: list[Any], reverse: bool = False) -> None:
    values.sort(reverse=reverse)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::dropout": F.dropout,
    "aten::scaled_dot_product_attention": _attention,
    "aten::tensor": _tensor,
    "aten::add.t": operator.add,
    "aten::list.t": list,
    "aten::mul.left_t": operator.mul,
    "aten::slice.t": lambda values, *bounds: values[slice(*bounds)],
    "aten::add_.t": operator.iadd,
    "aten::append.t": _changes(list.append),
    "aten::copy.t": list.copy,
    "aten::clear.t": list.clear,
    "aten::Delete.t": operator.delitem,
    "aten::extend.t": list.extend,
    "aten::insert.t": list.insert,
    "aten::pop.t": list.pop,
    "aten::reverse.t": list.reverse,
    **{f"aten::sort.{kind}": _sort for kind in ("int", "float", "bool", "str")},
    **{f"aten::remove.{kind}": list.remove for kind in ("int", "float", "bool", "str")},
    "aten::_set_item.t": _changes(operator.setitem),
    "aten::__getitem__": operator.getitem,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::__not__": operator.not_,
    "aten::len": len,
    "prim::ListConstruct": lambda *values: list(values),
    "prim::TupleConstruct": lambda *values: values,
    "prim::ListUnpack": tuple,
    "prim::TupleUnpack": tuple,
    "prim::TupleIndex": operator.getitem,
    "prim::NumToTensor": torch.tensor,
    "prim::Uninitialized": lambda: None,
    "prim::min": min,
    "prim::max": max,
    "prim::unchecked_cast": lambda value: value,
    "prim::dtype": lambda x: x.dtype,
    "prim::device": lambda x: x.device,
}
"""Kinds of nodes that are no ops, or are better called otherwise, or ops on lists of any type, by
their overload: what answers them."""

_READS = frozenset("item tolist Float Int Complex FloatImplicit IntImplicit ScalarImplicit".split())
"""Ops that make numbers of the values of a tensor."""

_NUMBERS: dict[str, tuple[type, ...]] = {
    "FloatType": (float, int),
    "IntType": (int, torch.dtype, torch.layout),
    "BoolType": (bool,),
    "StringType": (str,),
    "DeviceObjType": (torch.device,),
}
"""Declared types of arguments besides tensors, and what they take."""


def call_script(interpret: Callable[..., Any], script: Any, args: tuple, kwargs: dict) -> Any:
    """A call of the ScriptFunction `script` in a pass.

    Args:
        interpret: runs a function of TorchScript, `interpret(script, *args, **kwargs)`.

    Raises:
        RuntimeError: the tangent can't be followed.
    """
    if _has_pair((args, kwargs)):
        graph = script.inlined_graph
        inputs = [value.debugName() for value in graph.inputs()]
        values = dict(zip(inputs, _bound(script, args, kwargs), strict=True))
        (result,) = _run(script, graph, values)
        return result
    try:
        return interpret(script, *args, **kwargs)
    except RuntimeError as error:
        if not str(error).rstrip().endswith("RuntimeError:"):  # of a Dual it has no words
            raise
        raise _refusal(script, "failed on a tensor with a tangent inside of an object") from error


def _has_pair(values: Any) -> bool:
    """Whether a Dual is among arguments, or in a list, tuple or dictionary of them."""
    return any(type(value) is Dual for value in tree_leaves(values))


def _refusal(script: Any, what: str) -> RuntimeError:
    return RuntimeError(
        f"stars_fast: {script.name} of TorchScript {what}, which a tangent can't follow; use the "
        "function that it was made of"
    )


def _bound(script: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments in the order of the parameters, as the interpreter makes them."""
    declared = script.schema.arguments
    names = [each.name for each in declared]
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
        raise TypeError(f"{script.name}: expected arguments {names}, got others or too many")
    values = []
    for each in declared:
        if each.name in given:
            values.append(_as_declared(script, each.name, given[each.name], each.type))
        elif each.has_default_value():
            values.append(each.default_value)
        else:
            raise TypeError(f"{script.name}: argument {each.name} is missing")
    return values


def _as_declared(script: Any, name: str, value: Any, kind: Any) -> Any:
    known = kind.kind()
    if known == "OptionalType":
        inside = kind.getElementType()
        return None if value is None else _as_declared(script, name, value, inside)
    if known == "TensorType" and isinstance(value, Tensor):
        return value
    if known == "ListType" and isinstance(value, (list, tuple)):
        return [_as_declared(script, name, each, kind.getElementType()) for each in value]
    if isinstance(value, _NUMBERS.get(known, ())):
        return float(value) if isinstance(value, int) and known == "FloatType" else value
    got = "a tensor with a tangent" if type(value) is Dual else type(value).__name__
    raise _refusal(script, f"takes {kind} as {name} and was given {got}")


def _run(script: Any, block: Any, values: dict[str, Any]) -> list[Any]:
    """The outputs of a graph, or of a block of one; `values` are those of its names so far."""
    for node in block.nodes():
        kind = node.kind()
        names = [value.debugName() for value in node.outputs()]
        inputs = [values[value.debugName()] for value in node.inputs()]
        if kind == "prim::If":
            then, otherwise = node.blocks()
            found = _run(script, then if inputs[0] else otherwise, values)
        elif kind == "prim::Loop":
            found = _turns(script, node, inputs, values)
        elif kind == "prim::RaiseException":
            raise RuntimeError(str(inputs[0]))
        else:
            result = _answer(script, node, kind, inputs)
            found = [result] if len(names) == 1 else list(result or ())
        values.update(zip(names, found, strict=True))
    return [values[value.debugName()] for value in block.outputs()]


def _turns(script: Any, node: Any, inputs: list[Any], values: dict[str, Any]) -> list[Any]:
    """The results of a loop."""
    (body,) = node.blocks()
    names = [value.debugName() for value in body.inputs()]
    limit, goes_on, *carried = inputs
    turn = 0
    while goes_on and turn < limit:
        values.update(zip(names, (turn, *carried), strict=True))
        goes_on, *carried = _run(script, body, values)
        turn += 1
    return carried


def _answer(script: Any, node: Any, kind: str, inputs: list[Any]) -> Any:
    """The result of a node."""
    if kind == "prim::Constant":
        return node.output().toIValue()
    overload = node.schema().partition("(")[0]
    known = _FUNCTIONS.get(kind) or _FUNCTIONS.get(overload)
    return _call(script, node, overload, inputs) if known is None else known(*inputs)


def _call(script: Any, node: Any, overload: str, inputs: list[Any]) -> Any:
    """The result of an op."""
    library, _, name = overload.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, library), name, None) if library == "aten" else None
    op = getattr(packet, overload or "default", None)
    if op is None:
        raise _refusal(script, f"has a {node.kind()}")
    schema = op._schema
    if any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments):
        raise _refusal(script, f"writes into a tensor or a list by {node.kind()}")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise _refusal(script, f"draws random numbers by {node.kind()}")
    if not any("Tensor" in str(each.type) for each in schema.returns):
        if name in _READS and _has_pair(inputs):
            raise _refusal(script, f"makes a number of a tensor with a tangent by {node.kind()}")
        inputs = [primal_of(value) for value in inputs]  # such as a size
    pairs = list(zip(schema.arguments, inputs, strict=True))
    named = {each.name: value for each, value in pairs if each.kwarg_only}
    return op(*(value for each, value in pairs if not each.kwarg_only), **named)
