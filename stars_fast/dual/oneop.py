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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from stars_fast.dual.tensor import Dual


class _Call:
    """One call of one op: what it is called with, apart from the tensors.

    The tensors come in three groups: stacks of Duals, plain tensors that require a gradient, and
    the others, which are kept among the saved tensors so that a later write to them is noticed.
    """

    def __init__(self, func: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> None:
        self.func, self.name = func, name
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
        self.aliases = False
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
        """The floating-point outputs."""
        self(*inputs)
        smooth = tuple(out for out in self.outputs if _is_smooth(out))
        if not smooth:
            raise _ValueOnly
        return smooth

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
        stacks, plains = tensors[: self.stacks], tensors[self.stacks : self.smooth_inputs]
        primals = [stack[0] for stack in stacks] + list(plains)
        tangents = [stack[1] for stack in stacks] + [torch.zeros_like(x) for x in plains]
        return primals, tangents


class _OneOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        primals, tangents = call.split(tensors)
        # Inside a Function torch turns forward mode off.
        with forward_ad._set_fwd_grad_enabled(True), forward_ad.dual_level():
            inputs = map(forward_ad.make_dual, primals, tangents)
            smooth = call.smooth(*inputs, *tensors[call.smooth_inputs :])
            memory = {stack.untyped_storage().data_ptr() for stack in tensors[: call.stacks]}
            call.aliases = any(out.untyped_storage().data_ptr() in memory for out in smooth)
            pairs = [forward_ad.unpack_dual(out) for out in smooth]
            call.outputs = [None if _is_smooth(out) else out for out in call.outputs]
        if any(pair.tangent is None for pair in pairs):
            # torch.func.jvp would answer zeros here: an op that torch can't see through.
            raise RuntimeError(
                f"stars_fast: {call.name} gives a result without a tangent: torch has no forward "
                "derivative for it; detach its input where a constant is meant"
            )
        return tuple(
            torch.stack((pair.primal, pair.tangent.to(pair.primal.dtype))) for pair in pairs
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        tensors = tuple(x.detach() for x in ctx.saved_tensors)
        primals, tangents = call.split(tensors)
        with (
            call.same_draws(),
            forward_ad._set_fwd_grad_enabled(True),
            forward_ad.dual_level(),
            torch.enable_grad(),
        ):
            inputs = [
                forward_ad.make_dual(x.requires_grad_(), x_dot)
                for x, x_dot in zip(map(torch.clone, primals), tangents, strict=True)
            ]
            outputs = call.smooth(*inputs, *tensors[call.smooth_inputs :])
            call.outputs = []
            bars, dot_bars = [g[0] for g in grads], [g[1] for g in grads]
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
        stacks = [torch.stack((bar, dot_bar)) for dot_bar, bar in pairs[: call.stacks]]
        plains = [bar for _, bar in pairs[call.stacks :]]
        return None, *stacks, *plains, *[None] * (len(tensors) - call.smooth_inputs)


def _part(grad: Tensor | None, half: int, x: Tensor) -> Tensor:
    """Primal or tangent of a gradient; None is zero: the op does not depend on this input, or is
    linear in it."""
    part = None if grad is None else forward_ad.unpack_dual(grad)[half]
    return torch.zeros_like(x) if part is None else part.detach()


def jvp(func: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> Any:
    """Run one op on Duals: floating-point outputs become Duals, others stay plain.

    Raises:
        RuntimeError: torch has no forward derivative for the op, named by `name`.
    """
    call = _Call(func, name, args, kwargs)
    try:
        if torch.is_inference_mode_enabled():
            # Forward mode is off for inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                stacks = iter(_OneOp.apply(call, *(x.clone() for x in call.tensors)))
        else:
            stacks = iter(_OneOp.apply(call, *call.tensors))
    except _ValueOnly:
        return tree_unflatten(call.outputs, call.out_spec)
    except NotImplementedError as error:
        raise RuntimeError(
            f"stars_fast: {name} has no rule and no forward derivative in torch: {error}"
        ) from error
    filled = [Dual(next(stacks)) if out is None else out for out in call.outputs]
    call.outputs = []
    if call.aliases:
        # A view in torch, a copy here: no later write may go through it.
        for leaf in (*tree_leaves((args, kwargs)), *filled):
            if type(leaf) is Dual:
                leaf.frozen = name
    return tree_unflatten(filled, call.out_spec)


class _ValueOnly(Exception):
    """The op has no floating-point output: it is a question about values."""


def _is_smooth(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
