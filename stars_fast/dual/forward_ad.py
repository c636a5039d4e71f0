"""The dual of one op that has no rule, by torch's forward-mode derivatives, and its exact gradient.

Forward runs the op on torch's own dual tensors, as `torch.func.jvp` does. Backward uses that the
reverse of a dual op is the dual of its reverse with the cotangents swapped: with vjp(x; y_bar) the
op's ordinary backward,

    (x_dot_bar, x_bar) = jvp of vjp at (x, y_dot_bar) in the direction (x_dot, y_bar)
                       = jvp of vjp(.; y_dot_bar) at x in the direction x_dot, + (0, vjp(x; y_bar))

which is forward over reverse, the order that torch tests. The other order, autograd of the forward
derivative, is wrong in torch 2.13 for ops that save intermediate results, such as layer_norm or
linalg.solve: it takes what they saved for constants.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from stars_fast.dual.layout import frozen, overlaps, pack_pair
from stars_fast.dual.tensor import Dual
from stars_fast.ops.first_derivative import first_derivative

# Ops whose inputs eager keeps for its backward too: they may not be overwritten there either, so no
# copy is needed.
_KEEP_INPUTS = frozenset(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d softplus mish elu celu
    hardswish logaddexp prelu bilinear group_norm batch_norm
    """.split()
)

# torch counts the levels of forward mode for the whole process, not for each thread.
_forward_mode = threading.RLock()


_MOVES = object()
"""Stands among the outputs of a call for one that has a tangent."""


@dataclass(frozen=True)
class View:
    """An output that lies in the memory of an input: of which stack, and where in its memory; None
    for what strides can't say, such as another dtype."""

    stack: int
    place: tuple[Any, ...] | None


class Call:
    """One call of one op: what it is called with, apart from the tensors.

    The tensors come in three groups: stacks of Duals, plain tensors that require a gradient, and
    the others, which are kept among the saved tensors so that a later write to them is noticed.
    """

    def __init__(
        self, func: Callable[..., Any], name: str, args: tuple, kwargs: dict, may_leave_out: bool
    ) -> None:
        self.func, self.name, self.may_leave_out = func, name, may_leave_out
        self.leaves, self.spec = tree_flatten((args, kwargs))
        tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        duals = [i for i in tensors if type(self.leaves[i]) is Dual]
        plains = [i for i in tensors if i not in duals and self.leaves[i].requires_grad]
        others = [i for i in tensors if i not in duals and i not in plains]
        self.places = (*duals, *plains, *others)
        self.stacks, self.smooth_inputs = len(duals), len(duals) + len(plains)
        self.tensors = [self.leaves[i].stack for i in duals]
        self.tensors += [self.leaves[i] for i in (*plains, *others)]
        for i in self.places:
            self.leaves[i] = None
        self.outputs: list[Any] = []
        self.out_spec: Any = None
        self.views: list[View | None] = []
        self.arrange: list[Callable[[Tensor], Tensor]] = []
        self.grad_enabled = torch.is_grad_enabled()
        self.device = self.tensors[0].device
        self.autocast = torch.is_autocast_enabled(self.device.type)
        self.autocast_dtype = torch.get_autocast_dtype(self.device.type)
        self.rng = torch.get_rng_state()
        self.cuda_rng = (
            torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        )

    def __call__(self, *inputs: Tensor) -> None:
        """Run the op on the values of its tensors; leaves `outputs`."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, inputs, strict=True):
            leaves[place] = value
        args, kwargs = tree_unflatten(leaves, self.spec)
        with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast):
            self.outputs, self.out_spec = tree_flatten(self.func(*args, **kwargs))

    def smooth(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The floating-point outputs, but for constants."""
        self(*inputs)
        smooth = tuple(filter(self.has_tangent, self.outputs))
        if not smooth:
            raise ValueOnly
        return smooth

    def differentiable(self, inputs: list[Tensor], tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """The outputs with a gradient by `inputs`; the others of `outputs` become constants."""
        self(*inputs, *tensors[self.smooth_inputs :])
        found = [is_smooth(out) and out.requires_grad for out in self.outputs]
        outputs = [out for out, smooth in zip(self.outputs, found, strict=True) if smooth]
        if not outputs:
            raise ValueOnly
        self.outputs = [
            _MOVES if smooth else out for out, smooth in zip(self.outputs, found, strict=True)
        ]
        return outputs

    def packed(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        """Memory of the stacks of outputs, of their primals and tangents; `arrange` makes them."""
        packed = [pack_pair(y.detach(), y_dot.detach().to(y.dtype)) for y, y_dot in pairs]
        self.arrange = [arrange for _, arrange in packed]
        return tuple(memory for memory, _ in packed)

    def has_tangent(self, out: Any) -> bool:
        """Whether an output has a tangent, or lacks one that it should have."""
        if not is_smooth(out):
            return False
        return not self.may_leave_out or forward_ad.unpack_dual(out).tangent is not None

    @contextmanager
    def same_draws(self) -> Iterator[None]:
        """A region in which a random op draws again what it drew."""
        with torch.random.fork_rng(devices=[] if self.cuda_rng is None else [self.device]):
            torch.set_rng_state(self.rng)
            if self.cuda_rng is not None:
                torch.cuda.set_rng_state(self.cuda_rng, self.device)
            yield

    def split(self, tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """Primals and tangents of the smooth inputs; a plain tensor has a zero tangent."""
        # Forward mode takes no tensor whose elements share memory.
        smooth = [x.clone() if overlaps(x) else x for x in tensors[: self.smooth_inputs]]
        stacks, plains = smooth[: self.stacks], smooth[self.stacks :]
        primals = [stack[0] for stack in stacks] + plains
        tangents = [stack[1] for stack in stacks] + [torch.zeros_like(x) for x in plains]
        return primals, tangents

    def check(self, values: Any, versions: list[int], pairs: list[Any]) -> None:
        """Raise where the op did what its dual can't follow."""
        if [version_of(x) for x in values] != versions:
            raise RuntimeError(
                f"stars_fast: {self.name} writes into its arguments, which would change a value "
                "and leave its tangent; use an out-of-place form, or detach what it is given"
            )
        if any(pair.tangent is None for pair in pairs):
            # torch.func.jvp would answer zeros here: an op that torch can't see through.
            raise RuntimeError(
                f"stars_fast: {self.name} gives a result without a tangent: torch has no forward "
                "derivative for it; detach its input where a constant is meant"
            )
        if any(pair.primal.requires_grad for pair in pairs):
            raise RuntimeError(
                f"stars_fast: {self.name} uses a tensor that requires a gradient and is none of "
                "its arguments (a weight held by a compiled object or a closure), so its gradient "
                "would be lost; pass the tensor as an argument, or call the Python code instead"
            )


@contextmanager
def _forward_levels() -> Iterator[None]:
    """A level of forward mode, for one thread at a time."""
    with _forward_mode, forward_ad._set_fwd_grad_enabled(True), forward_ad.dual_level():
        yield


def version_of(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def views_of(
    stacks: Sequence[Tensor], primals: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[View | None]:
    """For each output, where it lies in the memory of one of the primals that the op was given."""
    owners = {x.untyped_storage().data_ptr(): i for i, x in enumerate(primals) if x.numel()}
    found: list[View | None] = []
    for out in outputs:
        place = out.untyped_storage().data_ptr() if out.numel() else None
        owner = None if place is None else owners.get(place)
        if owner is None:
            found.append(None)
            continue
        stack = stacks[owner]
        by_strides = (
            out.dtype == stack.dtype
            and not (out.is_conj() or out.is_neg())
            and stack.untyped_storage().data_ptr() == place
        )
        where = (out.shape, out.stride(), out.storage_offset()) if by_strides else None
        found.append(View(owner, where))
    return found


class _OneOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        # Eager may keep less than the inputs, and allow to overwrite them.
        copied = 0 if call.name.rpartition(".")[2] in _KEEP_INPUTS else call.stacks
        ctx.save_for_backward(*(x.clone() for x in tensors[:copied]), *tensors[copied:])
        values = tuple(x.detach() for x in tensors)
        primals, tangents = call.split(values)
        versions = [version_of(x) for x in values]
        # Inside a Function torch turns forward mode and gradients off. The inputs are constants
        # here: a result that requires a gradient depends on more than them.
        with _forward_levels(), torch.set_grad_enabled(call.grad_enabled):
            inputs = map(forward_ad.make_dual, primals, tangents)
            smooth = call.smooth(*inputs, *values[call.smooth_inputs :])
            pairs = [forward_ad.unpack_dual(out) for out in smooth]
            call.outputs = [_MOVES if call.has_tangent(out) else out for out in call.outputs]
        call.check(values, versions, pairs)
        call.views = views_of(values, primals[: call.stacks], [pair.primal for pair in pairs])
        return call.packed(pairs)

    @staticmethod
    @first_derivative("forward derivative")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        tensors = tuple(x.detach() for x in ctx.saved_tensors)
        primals, tangents = call.split(tensors)
        with call.same_draws(), _forward_levels(), torch.enable_grad():
            inputs = [
                forward_ad.make_dual(x.requires_grad_(), x_dot)
                for x, x_dot in zip(map(torch.clone, primals), tangents, strict=True)
            ]
            outputs = call.smooth(*inputs, *tensors[call.smooth_inputs :])
            call.outputs = []
            stacks = [arrange(g) for arrange, g in zip(call.arrange, grads, strict=True)]
            bars, dot_bars = [g[0] for g in stacks], [g[1] for g in stacks]
            # With create_graph torch takes the form of a backward that can be differentiated.
            grad = functools.partial(
                torch.autograd.grad, outputs, inputs, create_graph=True, allow_unused=True
            )
            try:
                # A reverse pass is linear in its cotangent, but torch's formulas need not be smooth
                # in it (logcumsumexp takes its logarithm): y_bar goes by itself, not as a
                # direction.
                first, second = grad(bars), grad(dot_bars)
            except (NotImplementedError, RuntimeError) as error:
                raise RuntimeError(
                    f"stars_fast: {call.name} has no rule, and torch can't differentiate its "
                    f"forward derivative: {error}"
                ) from error
            pairs = [
                (_part(g, 0, x), _part(g, 1, x) + _part(f, 0, x))
                for f, g, x in zip(first, second, primals, strict=True)
            ]
        stack_bars = [torch.stack((bar, dot_bar)) for dot_bar, bar in pairs[: call.stacks]]
        plain_bars = [bar for _, bar in pairs[call.stacks :]]
        return None, *stack_bars, *plain_bars, *[None] * (len(tensors) - call.smooth_inputs)


def _part(grad: Tensor | None, half: int, x: Tensor) -> Tensor:
    """Primal or tangent of a gradient; None is zero: the op does not depend on this input, or is
    linear in it."""
    part = None if grad is None else forward_ad.unpack_dual(grad)[half]
    return torch.zeros_like(x) if part is None else part.detach()


def jvp(
    func: Callable[..., Any], name: str, args: tuple, kwargs: dict, *, may_leave_out: bool = False
) -> Any:
    """Run one op on Duals: floating-point outputs become Duals, others stay plain.

    Args:
        may_leave_out: whether an output without a tangent is meant as a constant, as
            `mark_non_differentiable` says.

    Raises:
        NoForwardDerivative: torch has none for the op, named by `name`.
    """
    call = Call(func, name, args, kwargs, may_leave_out)
    try:
        return run_op(_OneOp, call, args, kwargs)
    except NotImplementedError as error:
        raise NoForwardDerivative(
            f"stars_fast: {name} has no rule and no forward derivative in torch: {error}"
        ) from error


def run_op(op: type[torch.autograd.Function], call: Call, args: tuple, kwargs: dict) -> Any:
    """Run a call through `op`, a function of stacks. Returns the same as `jvp`."""
    try:
        if torch.is_inference_mode_enabled():
            # Forward mode is off for inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                stacks = iter(op.apply(call, *(x.clone() for x in call.tensors)))
        else:
            stacks = iter(op.apply(call, *call.tensors))
    except ValueOnly:
        return tree_unflatten(call.outputs, call.out_spec)
    places = zip(stacks, call.arrange, call.views, strict=True)
    duals = iter([_filled(call, arrange(memory), view) for memory, arrange, view in places])
    filled = [next(duals) if out is _MOVES else out for out in call.outputs]
    call.outputs = []
    if any(view is not None and view.place is None for view in call.views):
        # A view in torch, a copy here: no later write may go through it.
        for leaf in (*tree_leaves((args, kwargs)), *filled):
            if type(leaf) is Dual:
                frozen.set(leaf.stack, call.name)
    return tree_unflatten(filled, call.out_spec)


def _filled(call: Call, stack: Tensor, view: View | None) -> Dual:
    """An output: a view of the input's stack where torch gives a view of the input."""
    if view is None or view.place is None:
        return Dual(stack)
    source, (shape, stride, offset) = call.tensors[view.stack], view.place
    # Seen from the whole memory: the stack may be one of several views, and the output reach
    # beyond it.
    whole = source if source._base is None else source._base
    return Dual(whole.as_strided((2, *shape), (source.stride(0), *stride), offset))


class NoForwardDerivative(RuntimeError):
    """Torch has no forward derivative of an op."""


class ValueOnly(Exception):
    """The op has no floating-point output: it is a question about values."""


def is_smooth(value: Any) -> bool:
    """Whether a value is a tensor that can have a tangent."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
