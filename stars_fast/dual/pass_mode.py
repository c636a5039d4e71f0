"""Tensors that a block makes and then fills: `torch.zeros(...)`, then `copy_`, `index_add_` or an
assignment of what depends on h.

While a pass runs, a torch function mode notes the plain tensors that the block's own calls make,
and the views of them. The first value with a tangent that is written into such a tensor turns it,
and its views, into Duals with one stack between them; what was detached from it shares the values
alone. A tensor from outside of the pass, such as a buffer, is not turned: it would keep a tangent
beyond the pass. Through its `.data` it takes values (`written`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stars_fast.dual.dropped import dropped
from stars_fast.dual.forward_ad import is_smooth
from stars_fast.dual.layout import order_of, stack_pair
from stars_fast.dual.packing import packing_hooks
from stars_fast.dual.registry import may_write, objects_named
from stars_fast.dual.running import running_pass, settle_all, state
from stars_fast.dual.tensor import Dual, is_ordinary, respond
from stars_fast.dual.written import CUTS, Written, write_values

# What shares memory with the outside.
_FOREIGN = frozenset(
    target
    for name in "from_numpy frombuffer as_tensor asarray from_dlpack".split()
    for target in objects_named(name)
)
# What reads and does not write, between the ops of a formula: nothing that waits has to run first.
_PURE = frozenset(
    target
    for name in """
    shape dtype device ndim requires_grad is_cuda size dim numel __len__ float to type_as
    add __add__ __radd__ sub __sub__ __rsub__ mul __mul__ __rmul__ neg __neg__ div __truediv__
    __getitem__ unsqueeze squeeze view reshape expand transpose permute contiguous cos sin
    __bool__ __eq__ __ne__ eq ne
    """.split()
    for target in objects_named(name)
)

# What makes a tensor of anything, tensors too.
_OF_DATA = frozenset((torch.tensor, torch.as_tensor))
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_count_modes = torch._C._len_torch_function_stack


class Pass(TorchFunctionMode):
    """One dual pass: it notes the tensors that are made inside, with their views.

    Attributes:
        running: whether the pass runs, or a part of it is computed again. A Dual that is met
            otherwise was left behind, and stands for its primal.
        inference: whether the pass as a whole is in torch's inference mode.
        tangent_of: the shape of the state where the tangent alone is asked for, else None.
        packing: what packs the tensors that autograd saves, as the pass begins; None for nothing.
    """

    def __init__(self, tangent_of: torch.Size | None = None) -> None:
        super().__init__()
        self.tangent_of = tangent_of
        self.inference = torch.is_inference_mode_enabled()
        self.packing = packing_hooks(False)
        self._made: dict[int, list[weakref.ref[Tensor]]] = {}
        self._by_data: list[weakref.ref[Tensor]] = []
        # What `.data` and `.detach()` gave of tensors from outside, with views; memory of pairs.
        self._cut: dict[int, list[weakref.ref[Tensor]]] = {}
        self._of_pairs: set[int] = set()
        self._written: list[weakref.ref[Tensor]] = []
        self._outer: list[Pass | None] = []
        self._depth = 0

    @property
    def running(self) -> bool:
        return bool(self._outer)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if Dual in types:
            ordinary = len(types) == 1 or all(kind is Dual or is_ordinary(kind) for kind in types)
            if Written in types:
                return Written.__torch_function__(func, types, args, kwargs)
            if ordinary and args and type(args[0]) is not Dual and may_write(func):
                if type(args[0]) is Tensor and self._mark_written(args[0]):
                    return write_values(func, args, kwargs or {})
                if self._keeps_values(args[0]):
                    _say_dropped(func, args, kwargs or {})
                    return write_values(func, args, kwargs or {})
            # Straight to the rules, unless a mode around the pass is to see the call first.
            if ordinary and not _count_modes():
                result = respond(func, types, args, kwargs or {})
                if type(result) is Tensor:
                    self._note(func, result, args)
                return result
        elif func not in _PURE or kwargs:
            if getattr(func, "__name__", "") == "__set__" and type(args[1]) is Dual:
                if func == _SET_DATA and self._is_outside(args[0]):
                    return write_values(func, args, {})
                return respond(func, types, args, {})  # torch asks the tensor that is set alone
            if func in _OF_DATA and args and type(args[0]) is Dual:
                return respond(func, types, args, kwargs or {})  # torch asks no tensor
            settle_all()
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor:
            self._note(func, result, args)
        elif type(result) in (tuple, list):
            for each in result:
                self._note(func, each, args)
        return result

    def __enter__(self) -> Pass:
        self._outer.append(state.running)
        state.running = self
        super().__enter__()
        self._depth = _count_modes()
        return self

    def __exit__(self, *error: Any) -> None:
        state.running = self._outer.pop()
        super().__exit__(*error)

    @property
    def looks(self) -> bool:
        """Whether the next call comes by here: not while it answers one, nor under another mode."""
        return _count_modes() == self._depth

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """A region of the pass whose calls do not come by here, as while it answers one."""
        super().__exit__(None, None, None)
        try:
            yield
        finally:
            super().__enter__()

    def _note(self, func: Any, tensor: Any, args: tuple) -> None:
        """Keep in mind a tensor that is made here, or a view of one."""
        if type(tensor) is not Tensor or not is_smooth(tensor) or not tensor.numel():
            return
        place = _address(tensor)
        if place is None:
            return
        family = self._made.get(place)
        if family is not None and any(ref() is not None for ref in family):
            family.append(weakref.ref(tensor))
            if func == _GET_DATA:
                self._by_data.append(weakref.ref(tensor))
        elif tensor._base is not None:
            if place in self._cut:
                self._cut[place].append(weakref.ref(tensor))
        elif func not in _FOREIGN:
            given = [x for x in args if isinstance(x, Tensor)]
            sources = [x for x in given if x is tensor or _address(_memory_of(x)) == place]
            if not sources:
                self._made[place] = [weakref.ref(tensor)]
            elif any(type(x) is Dual for x in sources):
                self._of_pairs.add(place)
            elif func in CUTS and place not in self._of_pairs:
                others = [ref for ref in self._cut.get(place, ()) if ref() is not None]
                self._cut[place] = [*others, weakref.ref(tensor)]

    def _keeps_values(self, target: Any) -> bool:
        """Whether what is written into is a tensor from outside while gradients are off: statistics
        that a block keeps, such as a running mean, whose tangent nobody asks for."""
        return (
            type(target) in (Tensor, torch.nn.Parameter)
            and not torch.is_grad_enabled()
            and not (type(target) is Tensor and self.turn(target))
        )

    def _is_outside(self, target: Any) -> bool:
        """Whether a tensor is neither made here nor shares memory with a pair."""
        place = _address(target)
        ours = place is None or place in self._made or place in self._of_pairs
        return type(target) in (Tensor, torch.nn.Parameter) and not ours

    def _mark_written(self, target: Tensor) -> bool:
        """Note that a tensor that was cut off from one from outside, or its view, is written into;
        False for another tensor."""
        place, root = _address(target), _root(target)
        alive = [ref() for ref in self._cut.get(place, ())] if place is not None else []
        family = [x for x in alive if x is not None and _root(x) is root]
        if not any(x is root for x in family):
            return False
        for x in (*family, target):
            x.__class__ = Written
            self._written.append(weakref.ref(x))
        return True

    def release(self) -> None:
        """Make plain tensors of those that only this pass must not read."""
        for ref in self._written:
            if (tensor := ref()) is not None:
                tensor.__class__ = Tensor
        self._written.clear()

    def turn(self, target: Tensor) -> bool:
        """Make Duals of a tensor that was made here and of its views; False for another tensor."""
        place = _address(target)
        alive = [ref() for ref in self._made.get(place, ())] if place is not None else []
        family = [tensor for tensor in alive if tensor is not None]
        if place is None or not any(tensor is target for tensor in family):
            return False
        root = _root(target)
        order = order_of(root)
        flat = root if order is None else root.permute(order)
        if not flat.is_contiguous() or root.storage_offset():
            return False
        if not all(_is_view_of(tensor, root) for tensor in family):
            return False
        kept = root.is_inference()  # where no tensor knows of what it is a view
        apart = [] if kept else [tensor for tensor in family if _root(tensor) is not root]
        if any(tensor.requires_grad for tensor in apart):
            return False
        del self._made[place]
        stack = stack_pair(root, torch.zeros_like(root))
        with torch.no_grad():
            root.detach().fill_(torch.nan)  # this memory is not read any more: a slip shows
        for tensor in reversed(family):  # views before what they are views of
            view = _same_view(stack, tensor)
            if any(tensor is each for each in apart):
                if any(ref() is tensor or ref() is root for ref in self._by_data):
                    tensor.data = view[0].detach()  # with a count of writes of its own
                else:
                    _become_alias(tensor, view[0].detach())
            else:
                self._become_dual(tensor, view)
        return True

    def _become_dual(self, tensor: Tensor, stack: Tensor) -> None:
        tensor.__class__ = Dual
        tensor.stack = stack  # type: ignore[attr-defined]
        tensor.turned = True  # type: ignore[attr-defined]
        tensor.owner = self  # type: ignore[attr-defined]


def _become_alias(tensor: Tensor, other: Tensor) -> None:
    """Make a plain tensor one with `other`, with its count of writes, by which autograd sees that
    what it has saved was overwritten. What it has saved of `tensor` already it finds so now."""
    with torch._C.DisableTorchFunction():
        other.__dict__.update(tensor.__dict__)  # they change places too
        try:
            torch.utils.swap_tensors(tensor, other)
        except RuntimeError:  # saved
            tensor.data = other


def _root(tensor: Tensor) -> Tensor:
    """The tensor of which this is a view, to autograd: none of what it was detached from."""
    return tensor if tensor._base is None else tensor._base


def _is_view_of(tensor: Tensor, root: Tensor) -> bool:
    """Whether a tensor that shares memory with root can share that of its pair: one of its dtype,
    or real or imaginary parts, that reaches no further."""
    alike = not tensor.is_neg() and root.dtype in (tensor.dtype, tensor.dtype.to_complex())
    return alike and _end(tensor) <= _end(root)


def _end(tensor: Tensor) -> int:
    """Where a tensor ends in its memory, in bytes."""
    reach = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return int(tensor.storage_offset() + reach + 1) * tensor.itemsize


def _same_view(stack: Tensor, tensor: Tensor) -> Tensor:
    """The part of both halves that `tensor` is of the primal's memory."""
    if tensor.dtype != stack.dtype:
        stack = torch.view_as_real(stack)
    shape, stride = (2, *tensor.shape), (stack.stride(0), *tensor.stride())
    if (shape, stride) != (stack.shape, stack.stride()):
        stack = stack.as_strided(shape, stride, tensor.storage_offset())
    return stack.conj() if tensor.is_conj() else stack


def _say_dropped(func: Any, args: tuple, kwargs: dict) -> None:
    for each in tree_leaves((args, kwargs)):
        if type(each) is Dual:
            dropped(f"{func.__name__} into a plain tensor", each, waits=False)


def _memory_of(x: Tensor) -> Tensor:
    return x.stack if type(x) is Dual else x


def _address(tensor: Tensor) -> int | None:
    """Where the memory of a tensor begins; None for one without memory of its own, such as a sparse
    one or one inside torch.vmap."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


@contextmanager
def on_stacks() -> Iterator[None]:
    """A region of a pass that computes on stacks itself, such as a native model: its calls are not
    looked at, and cost what they cost outside of a pass."""
    running = running_pass()
    if running is None or not running.looks:  # a mode of the user's is inside
        yield
        return
    running.__exit__(None, None, None)
    try:
        yield
    finally:
        running.__enter__()


def is_recomputing() -> bool:
    """Whether no pass runs in this thread: a Dual met then is in a recomputed region."""
    return running_pass() is None


def turn_fresh(target: Any) -> bool:
    """Make a Dual of a plain tensor, in place, where the running pass made it."""
    running = running_pass()
    return running is not None and type(target) is Tensor and running.turn(target)
