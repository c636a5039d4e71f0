"""Questions about a Dual, answered by its primal: shape, dtype, comparisons, control flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.caller import torch_keeps
from stars_fast.dual.dropped import dropped
from stars_fast.dual.forward_ad import is_smooth, jvp
from stars_fast.dual.layout import in_eager
from stars_fast.dual.registry import RULES, Rule, add_rule, objects_named
from stars_fast.dual.rule import rule
from stars_fast.dual.tensor import Dual, primal_of

# Answered by the primal with no tangent: the derivative is zero or there is none to speak of.
_PRIMAL = """
    dtype device layout is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_nested
    is_mps is_xpu is_xla is_neg names itemsize nbytes element_size get_device is_floating_point
    is_complex is_inference is_conj storage_offset is_same_size bool
    __bool__ __int__ __index__ __contains__ is_nonzero eq ne lt le gt ge equal
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isclose allclose greater greater_equal less
    less_equal not_equal isnan isinf isfinite isposinf isneginf isreal signbit logical_not
    logical_and logical_or logical_xor any all argmax argmin argsort count_nonzero nonzero
    bucketize searchsorted sign floor ceil round trunc long int short byte randint_like
    result_type can_cast is_signed is_distributed
""".split()


def _by_primal(target: Callable[..., Any]) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        args = tuple(primal_of(arg) for arg in args)
        return target(*args, **{key: primal_of(value) for key, value in kwargs.items()})

    return answer


def _register_primal() -> None:
    for name in _PRIMAL:
        for target in objects_named(name):
            RULES[target] = Rule(name, "primal", _by_primal(target))


_register_primal()


def _register_layout() -> None:
    for name in ("stride", "is_contiguous"):
        method = getattr(Tensor, name)

        def answer(
            input: Dual, *args: Any, _method: Callable[..., Any] = method, **kwargs: Any
        ) -> Any:
            return _method(in_eager(input.stack), *args, **kwargs)

        add_rule(name, "primal", answer)


_register_layout()


def _register_numbers() -> None:
    """Register the queries that make a number of a value: it has no tangent, which is said."""
    for name in ("item", "tolist", "__float__", "__complex__"):
        method = getattr(Tensor, name)

        def answer(input: Dual, _name: str = name, _method: Callable[..., Any] = method) -> Any:
            dropped(_name.strip("_"), input)
            return _method(input.stack[0])

        add_rule(name, "primal", answer)


_register_numbers()


@rule("new_tensor", kind="primal")
def new_tensor(input: Any, data: Any, **kwargs: Any) -> Tensor:
    if type(data) is Dual:
        dropped("new_tensor", data)
        data = data.stack[0].detach()
    return primal_of(input).new_tensor(data, **kwargs)


@rule("tensor", kind="primal", owners=(torch,))
def tensor(data: Dual, **kwargs: Any) -> Tensor:
    dropped("tensor", data)
    return torch.tensor(data.stack[0].detach(), **kwargs)


@rule("as_tensor", kind="stacked", owners=(torch,))
def as_tensor(data: Dual, dtype: Any = None, device: Any = None) -> Any:
    given = {"dtype": dtype, "device": device}
    return data.to(**{key: value for key, value in given.items() if value is not None})


@rule("__format__", kind="primal")
def format_(input: Dual, format_spec: str) -> str:
    return format(input.stack[0], format_spec)


@rule("shape", kind="primal")
def shape(input: Dual) -> torch.Size:
    return input.stack.shape[1:]


@rule("size", kind="primal")
def size_rule(input: Dual, dim: int | None = None) -> Any:
    return input.stack.shape[1:] if dim is None else input.stack.shape[1:][dim]


@rule("dim", "ndimension", kind="primal")
def dim(input: Dual) -> int:
    return input.stack.dim() - 1


@rule("ndim", kind="primal")
def ndim(input: Dual) -> int:
    return input.stack.dim() - 1


@rule("numel", "nelement", kind="primal")
def numel(input: Dual) -> int:
    return input.stack.numel() // 2


@rule("__len__", kind="primal")
def length(input: Dual) -> int:
    if input.stack.dim() == 1:
        raise TypeError("len() of a 0-d tensor")
    return input.stack.shape[1]


@rule("requires_grad", kind="primal")
def requires_grad(input: Dual) -> bool:
    return input.stack.requires_grad


@rule("grad_fn", kind="primal")
def grad_fn(input: Dual) -> Any:
    return input.stack.grad_fn


@rule("is_leaf", kind="primal")
def is_leaf(input: Dual) -> bool:
    return input.stack.is_leaf


@rule("_base", kind="primal")
def base(input: Dual) -> Tensor | None:
    """Not None where the stack is a view: what wrappers ask before they trust a tensor."""
    return input.stack._base


@rule("grad", kind="primal")
def grad(input: Dual) -> None:
    return None


@rule("grad", kind="primal", owners=(torch.autograd,))
def autograd_grad(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "stars_fast: torch.autograd.grad of a tensor with a tangent: the derivative would have "
        "none; write it out with torch functions, or detach what it is taken by where a constant "
        "is meant"
    )


@rule("register_hook", kind="primal")
def register_hook(input: Dual, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """The hook sees the gradient of the stack, [2, ...]: when backward comes by is what wrappers
    such as FSDP want to know."""
    return input.stack.register_hook(hook)


def _ops_named(*names: str) -> Iterator[Any]:
    """torch.ops.aten.name and its overloads."""
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            yield packet
            yield from (getattr(packet, overload) for overload in packet.overloads())


@rule("detach", kind="primal")
def detach(input: Dual) -> Tensor:
    """A constant, as under torch.func.jvp: its tangent is zero. Nested checkpoints keep the inputs
    of the inner one this way: those stay pairs."""
    if torch_keeps():
        return Dual(input.stack.detach().requires_grad_(input.stack.requires_grad))
    return input.stack[0].detach()


for _op in _ops_named("detach"):
    RULES[_op] = Rule("detach", "primal", detach)


@rule("data", kind="primal")
def data(input: Dual) -> Tensor:
    """A constant, as `detach`, but not always meant as one."""
    dropped("data", input, waits=False)
    return input.stack[0].detach()


# A fresh tensor in the likeness of a Dual is a Dual with a zero tangent, so that what depends on h
# can be written into it.
_FRESH = """
    zeros_like empty_like ones_like full_like rand_like randn_like
    new_zeros new_empty new_ones new_full new
""".split()


def _fresh(name: str, target: Callable[..., Any]) -> Callable[..., Any]:
    plain = _by_primal(target)

    def answer(*args: Any, **kwargs: Any) -> Any:
        fills = {key: value for key, value in kwargs.items() if key != "input"}
        for fill in (*args[1:], *fills.values()):
            if type(fill) is Dual:
                dropped(f"fill value in {name}", fill)
        value = plain(*args, **kwargs)
        return Dual.join(value, torch.zeros_like(value)) if is_smooth(value) else value

    return answer


def _register_fresh() -> None:
    for name in _FRESH:
        for target in (*objects_named(name), *_ops_named(name)):
            RULES[target] = Rule(name, "stacked", _fresh(name, target))


_register_fresh()


@rule("requires_grad_", kind="primal")
def requires_grad_(input: Dual, requires_grad: bool = True) -> Dual:
    if input.stack.requires_grad and not requires_grad:
        raise RuntimeError(
            "stars_fast: requires_grad_(False) of a tensor with a tangent, which is no leaf; use "
            "detach()"
        )
    return input  # nothing asks a pair for a gradient of its own


def _refuse(names: str, reason: str) -> None:
    for name in names.split():

        def handler(*args: Any, _name: str = name, **kwargs: Any) -> None:
            raise RuntimeError(f"stars_fast: {_name} of a tensor with a tangent: {reason}")

        add_rule(name, "primal", handler)


_refuse("backward", "call backward on the loss that fused_jsrr or fused_jvp returns")
_refuse("data_ptr", "it has no memory of its own; compiled kernels need a rule")
_refuse("untyped_storage", "it has no storage of its own")
_refuse("set_", "in-place set_ can't carry it")
_refuse("resize_", "in-place resize_ can't carry it")
_refuse(
    "as_strided as_strided_ as_strided_copy as_strided_scatter",
    "it counts in the memory of a tensor, and a pair has two; use indexing or view",
)
_refuse("numpy __array__", "NumPy would lose it; detach() first where a number is meant")
_refuse("__dlpack__", "what reads it would lose it; detach() first where a number is meant")


@rule("sgn", kind="primal")
def sgn(input: Dual) -> Any:
    """Constant where real; of a complex number its direction, which moves."""
    if input.stack.is_complex():
        return jvp(torch.sgn, "sgn", (input,), {})
    return torch.sgn(input.stack[0])
