"""`Dual`: a primal and its tangent in one stacked tensor that any PyTorch code takes for a tensor.

`Dual(stack)` with `stack` of shape [2, *shape] stands for a tensor of shape `shape`: `stack[0]` is
the primal, `stack[1]` the tangent. Every torch function that meets a Dual arrives in
`__torch_function__`; an op with a rule takes it (`registry.RULES`), any other op goes through
torch's forward derivative of that one op (`fallback`). Autograd runs on the stack alone, so the
gradient of whatever is computed from tangents is exact, and module hooks, checkpointing and DDP see
nothing new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from stars_fast.dual import layout
from stars_fast.dual.caller import frame_outside, torch_keeps
from stars_fast.dual.layout import stack_pair
from stars_fast.dual.registry import (
    RECORDERS,
    RULES,
    Rule,
    answer_without_rule,
    objects_named,
    report,
)
from stars_fast.dual.running import settle_before, state

_wrapper = torch.Tensor._make_wrapper_subclass
_no_torch_function = torch._C.DisableTorchFunction
_get_is_leaf = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_get_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_get_grad_fn = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
# A wrapper has no memory: what asks for its address is an error, and no null pointer.
_refuse_address = torch._C._set_throw_on_mutable_data_ptr
_forward_mode = torch._C._is_fwd_grad_enabled
FORM = frozenset(
    each
    for name in """
        dtype device layout size dim ndimension numel nelement __len__ stride is_contiguous
        storage_offset element_size itemsize nbytes requires_grad is_leaf get_device is_cuda is_cpu
        is_meta is_xpu is_mps is_floating_point is_complex is_signed is_same_size result_type
    """.split()
    for each in objects_named(name)
)
"""Questions about what a tensor is, whose answers hold no number of it, beside those of `QUICK`."""
_NESTED = (
    "stars_fast: a dual pass inside a dual pass; the block may not call fused_jvp or fused_jsrr on "
    "a state that carries a tangent, nor with a block that uses one (detach it where a number is "
    "meant)"
)


class Dual(torch.Tensor):
    """A tensor with a tangent. Shape, dtype, device and control flow are the primal's.

    Args:
        stack: [2, *shape], floating point; primal first, tangent second.

    Raises:
        TypeError: `stack` is not a floating-point (or complex) tensor.
        ValueError: the leading dimension of `stack` is not 2.
    """

    # Libraries choose what computes for them by the module of a tensor's class, as opt_einsum does.
    __module__ = "torch"

    stack: Tensor
    # The op that it waits for (`recognition.steps.Step`): until then it has no stack.
    step: Any = None
    # Whether autograd unpacked this pair, from what it had saved; whether it was a plain tensor of
    # the block's own, with the history it had then.
    unpacked = False
    turned = False
    # The pass that made it; None outside of one.
    owner: Any = None

    @staticmethod
    def __new__(cls: type[Dual], stack: Tensor) -> Dual:
        if type(stack) is Dual:
            raise RuntimeError(_NESTED)
        if not (stack.is_floating_point() or stack.is_complex()):
            raise TypeError(f"Dual: stack: expected floating point, got {stack.dtype}")
        shape = stack.shape
        if not shape or shape[0] != 2:
            raise ValueError(f"Dual: stack: expected shape [2, ...], got {list(shape)}")
        self = _wrapper(
            cls,
            shape[1:],
            dtype=stack.dtype,
            device=stack.device,
            requires_grad=stack.requires_grad,
        )
        _refuse_address(self)
        self.stack = stack
        self.owner = state.running
        return self

    @classmethod
    def waiting(cls, step: Any) -> Dual:
        """A Dual whose stack `step` (a `recognition.steps.Step`) will give."""
        self = _wrapper(
            cls,
            step.shape,
            dtype=step.dtype,
            device=step.device,
            requires_grad=step.grad and step.smooth,
        )
        _refuse_address(self)
        self.step = step
        self.owner = state.running
        return self

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there: the attributes of a Dual that waits."""
        if self.step is None:
            raise AttributeError(f"'Dual' object has no attribute {name!r}")
        self.step.settle(self)
        return getattr(self, name)

    @property
    def primal(self) -> Tensor:
        """The value, [*shape]: a view of the stack."""
        return self.stack[0]

    @property
    def tangent(self) -> Tensor:
        """The tangent, [*shape]: a view of the stack."""
        return self.stack[1]

    @classmethod
    def join(cls, primal: Tensor, tangent: Tensor) -> Dual:
        """The Dual of a primal and a tangent; the tangent is broadcast and cast to the primal."""
        if tangent.dtype != primal.dtype:
            tangent = tangent.to(primal.dtype)
        if tangent.shape != primal.shape:
            tangent = tangent.expand(primal.shape)
        return cls(stack_pair(primal, tangent))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return respond(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd unpacks a pair that it had saved
            pair = Dual(args[0].stack)
            pair.unpacked = True
            return pair
        raise RuntimeError(
            f"stars_fast: {func} reached a Dual below its rules, where its tangent would be lost: "
            "in torch.vmap or a transform of torch.func (write the batched form or the derivative "
            "out, with torch functions), or in TorchScript or where torch functions are disabled "
            "(call the op from Python code, outside DisableTorchFunction)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Dual(primal={self.primal!r}, tangent={self.tangent!r})"

    def __deepcopy__(self, memo: dict) -> Dual:
        raise RuntimeError("stars_fast: a Dual lives inside one pass and can't be deep-copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("stars_fast: a Dual lives inside one pass and can't be pickled")


def pair_of(stack: Tensor) -> Dual:
    """The Dual of a stack that an op of this package gave, which needs no check."""
    shape, dtype, device, grad = stack.shape[1:], stack.dtype, stack.device, stack.requires_grad
    # By position takes a fifth less time: size, strides, storage_offset, memory_format, dtype,
    # layout, device, pin_memory, requires_grad.
    pair = _wrapper(Dual, shape, None, None, None, dtype, torch.strided, device, False, grad)
    _refuse_address(pair)
    pair.stack = stack
    pair.owner = state.running
    return pair


def respond(func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Answer a torch function that met a Dual: a question at once, an op of a known formula by what
    waits for the rest of it, any other op by its rule."""
    quick = QUICK.get(func)
    if quick is not None:
        return quick(args[0])
    if len(types) > 1:
        _check_types(func, types)
    running = state.running
    for arg in (*args, *kwargs.values()) if kwargs else args:
        kind = type(arg)
        if kind is Dual:
            check_history(arg)
            if arg.owner is running:
                continue
        elif kind is not tuple and kind is not list:
            continue
        if _is_left_over(arg) and not torch_keeps():
            args, kwargs = tree_map(_without_left_overs, (args, kwargs))
            return func(*args, **kwargs)
    if not _forward_mode() and func not in FORM and _is_constant_here():
        settle_before(func, args, kwargs)
        args, kwargs = tree_map(primal_of, (args, kwargs))
        return func(*args, **kwargs)
    if state.recognises:
        recorder = RECORDERS.get(func)
        if recorder is not None and args:
            result = recorder(func, args, kwargs)
            if result is not None:
                return result
    if state.waiting:
        settle_before(func, args, kwargs)
    return answer(func, args, kwargs)


def answer(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run one op on Duals, now."""
    result = _by_rule(func, args, kwargs)
    if layout.some_expanded():
        return _as_eager_lays_it(result, func, args, kwargs)
    return result


def _by_rule(func: Any, args: tuple, kwargs: dict) -> Any:
    found = RULES.get(func)
    if found is None or kwargs.get("out") is not None or _is_complex_for(found, args, kwargs):
        return answer_without_rule(func, args, kwargs)
    try:
        result = found.handler(*args, **kwargs)
    except TypeError:
        if found.accepts(args, kwargs):
            raise
        # A form of the torch function that the rule does not know, such as axis= for dim=.
        return answer_without_rule(func, args, kwargs)
    report(found.name, found.kind)
    return result


# What lies elsewhere without values than with them; the rules of these take the right order.
_NOT_ON_META = {
    F.scaled_dot_product_attention,
    F.logsigmoid,
    torch.index_fill,
    torch.Tensor.index_fill,
}


def _as_eager_lays_it(result: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """A result in the memory order that eager gives it. Rules take it from the strides of a pair,
    which are not eager's where a primal was expanded."""
    leaves = tree_leaves((args, kwargs))
    given = [x for x in leaves if type(x) is Dual and x.step is None]  # what waits is no view
    if func in _NOT_ON_META or all(layout.seen_by_eager(x.stack) is None for x in given):
        return result
    if resolve_name(func) is None:  # not torch's own: it may do more than give a result
        return result
    memories = {x.stack.untyped_storage().data_ptr() for x in given}

    def is_new(x: Any) -> bool:
        """Whether x is neither a view, here or in eager alone, nor what was written into."""
        if type(x) is not Dual or layout.frozen.get(x.stack):
            return False
        return x.stack.untyped_storage().data_ptr() not in memories

    parts, spec = tree_flatten(result)
    if not any(map(is_new, parts)):
        return result
    indexes = func is torch.Tensor.__getitem__  # without values it lies elsewhere
    likeness = functools.partial(_likeness, device=None if indexes else "meta")
    args, kwargs = tree_map(likeness, (args, kwargs))
    try:
        with _no_torch_function(), torch.no_grad():
            likes = tree_leaves(func(*args, **kwargs))
    except Exception:  # it ran with values: all that can fail is that there are none
        return result
    shapes, expected = ([getattr(x, "shape", None) for x in each] for each in (parts, likes))
    if shapes != expected:
        return result
    pairs = zip(parts, likes, strict=True)
    laid_out = (
        pair_of(layout.in_order(x.stack, layout.order_of(like))) if is_new(x) else x
        for x, like in pairs
    )
    return tree_unflatten(laid_out, spec)


def _likeness(x: Any, device: str | None) -> Any:
    """A tensor that has the strides of x in eager; of a Dual alone where `device` is None."""
    if not isinstance(x, Tensor) or (device is None and type(x) is not Dual):
        return x
    like = layout.in_eager(x.stack) if type(x) is Dual else x
    where = device or x.device
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=where)


QUICK: dict[Any, Callable[[Dual], Any]] = {}
"""torch function of one argument -> an answer that neither runs nor wakes anything."""


def _is_left_over(x: Any) -> bool:
    """Whether x is, or holds, a Dual of a pass that is over, such as one in a cache.

    Raises:
        RuntimeError: it is of a pass around the one that runs, which would take its tangent for
            one of its own.
    """
    if type(x) is Dual:
        owner, running = x.owner, state.running
        if owner is None or owner is running:
            return False
        if owner.running and running is not None:
            raise RuntimeError(_NESTED)
        return not owner.running
    if type(x) in (list, tuple):
        for each in x:  # no generator: nearly every view comes by with its sizes
            if type(each) is not int and _is_left_over(each):
                return True
    return False


def _without_left_overs(x: Any) -> Any:
    return x.stack[0] if type(x) is Dual and _is_left_over(x) else x


def _is_constant_here() -> bool:
    """Whether an op on Duals gives constants, asked where torch's forward mode is off: a pass turns
    it on (`patches.surroundings`). Off it is in `torch.inference_mode`, of which torch takes no
    derivatives, and while the forward of a custom autograd.Function runs.

    Raises:
        RuntimeError: the Function's own derivative would be passed over.
    """
    inference, running = torch.is_inference_mode_enabled(), state.running
    if inference and (running is None or not running.inference):
        return running is not None
    frame = frame_outside("torch", "stars_fast")
    raise RuntimeError(
        "stars_fast: the forward of a custom autograd function met a tensor with a tangent, at "
        f"{frame.f_code.co_filename}:{frame.f_lineno}, where the function's own derivative would "
        "be lost: it came through an `apply` that was bound before the pass (`f = Function.apply`),"
        " a list, an object or a closure; give the function a `jvp` and call `Function.apply(x)` "
        "with the tensor itself"
        + (" (or leave out torch.inference_mode inside of itself)" if inference else "")
    )


def _check_types(func: Any, types: Any) -> None:
    """Refuse operands whose class gives torch functions a meaning of its own: the rules would read
    them as ordinary tensors."""
    for kind in types:
        if kind is Dual or is_ordinary(kind) or (func in UNDERSTOOD and UNDERSTOOD[func](kind)):
            continue
        raise TypeError(
            f"stars_fast: {getattr(func, '__name__', func)} of a tensor with a tangent and a "
            f"{kind.__module__}.{kind.__qualname__}: expected plain tensors; what this class does "
            "is not known to the dual pass, convert it first"
        )


def is_ordinary(kind: type) -> bool:
    """Whether torch functions of this class mean what they mean for a Tensor."""
    if kind is Tensor or kind is torch.nn.Parameter:
        return True
    owner = next(each for each in kind.__mro__ if "__torch_function__" in each.__dict__)
    return owner in (torch.Tensor, torch.nn.Parameter)


UNDERSTOOD: dict[Any, Callable[[type], bool]] = {}
"""torch function -> whether its rule understands a class, beside Tensor."""


def _is_complex_for(found: Rule, args: tuple, kwargs: dict) -> bool:
    """Whether a rule for real numbers was given complex ones."""
    if not found.real:
        return False
    first = next((x for x in (*args, *kwargs.values()) if type(x) is Dual), None)
    return first is not None and first.stack.is_complex()


def check_history(dual: Dual) -> None:
    """A Dual's wrapper is always a leaf: history on it comes from a custom autograd.Function that
    ran on the pair as if it were a tensor, and autograd would lose the gradient of the stack."""
    with _no_torch_function():  # of subclasses and of modes
        if dual.unpacked:
            # Autograd tells the wrapper alone that it requires a gradient.
            dual.unpacked = False
            if _get_requires_grad(dual) and not dual.stack.requires_grad:
                dual.stack = dual.stack.detach().requires_grad_()
        if dual.turned or _get_is_leaf(dual):
            return
        node = _get_grad_fn(dual)
    raise RuntimeError(
        f"stars_fast: the custom autograd function {node.name()} was applied to a Dual where it "
        "can't be given its tangent: inside a recomputed region, or through an `apply` that was "
        "bound before the pass (`f = Function.apply`); give it a `jvp` and call it as "
        "`Function.apply(...)`, outside of checkpointed parts"
    )


def primal_of(value: Any) -> Any:
    """The primal of a Dual; anything else unchanged."""
    return value.stack[0] if type(value) is Dual else value


def align(stack: Tensor, ndim: int) -> Tensor:
    """The stack of a Dual as one of `ndim` dimensions, for broadcasting: ones after the pair."""
    missing = ndim + 1 - stack.dim()
    return stack.view(2, *([1] * missing), *stack.shape[1:]) if missing > 0 else stack
