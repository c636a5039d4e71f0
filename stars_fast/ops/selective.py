"""Results of cheap ops that a backward makes again instead of keeping them (selective activation
recomputation, Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).

A norm keeps its input and a gate keeps both of its own, so what they return follows from what is
kept anyway. Inside of `selective` a consumer that saves such a result, for the gradient of its
weight, saves how to make it: the backward calls the same implementation on the same tensors, which
gives the same bits.

    g, u --gated--> inner --linear-->      keeps g and u; inner is made again, once for all who ask
    h --norm--> x --linear, linear, ...--> keeps h
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from stars_fast.ops.library import implementation


class Recipe:
    """The op and the arguments that made a tensor; it makes an equal one.

    uses: of the tensor that are still to come in the backward, once it has begun.
    """

    def __init__(self, made: Tensor, op: str, args: tuple[Any, ...], function: str) -> None:
        self.op = op
        self.args = args
        self.function = function
        self.dtype = made.dtype
        self.version = made._version
        self.versions = _versions(args)
        self.uses = 0
        self._left = 0
        self._again: Tensor | None = None

    def again(self) -> Tensor:
        """The tensor, made anew by the first who asks and kept until the last has.

        Raises:
            RuntimeError: an argument was written to since.
        """
        if self._again is None:
            if _versions(self.args) != self.versions:
                raise RuntimeError(
                    f"{self.op}: expected its arguments unchanged until the backward, which calls "
                    "it again, got one that was written to in place"
                )
            with torch.no_grad():
                self._again = implementation(self.op, self.args[0], self.function)(*self.args)
            self._left = self.uses
        made = self._again
        self._left -= 1
        if self._left <= 0:
            self._again = None
        return made


class _Saved(NamedTuple):
    """A view of a tensor that is to be made again."""

    recipe: Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


_known: ContextVar[WeakIdKeyDictionary | None] = ContextVar("known", default=None)
"""Recipes of this thread's `recording`, by the storage of what they made."""


def remember(made: Tensor, op: str, *args: Any, function: str = "") -> Tensor:
    """`made`, which `implementation(op, args[0], function)(*args)` gives; inside of `recording` it
    is noted. The backward of the op itself must keep the arguments."""
    if torch.compiler.is_compiling():  # first: compilers know this, and no context variables
        return made
    known = _known.get()
    if known is None:
        return made
    storage = made.untyped_storage()
    whole = made.is_contiguous() and storage.nbytes() == made.numel() * made.element_size()
    tensors = [x for x in args if isinstance(x, Tensor)]
    # Of two in a chain one has to be kept, to make the other from.
    if whole and not any(x.untyped_storage() in known for x in tensors):
        plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
        known[storage] = Recipe(made, op, plain, function)
    return made


@contextmanager
def recording() -> Iterator[None]:
    """Inside, `recipe_of` knows the results of norms and gates; nothing is made again."""
    token = _known.set(WeakIdKeyDictionary())
    try:
        yield
    finally:
        _known.reset(token)


def recipe_of(tensor: Tensor) -> Recipe | None:
    """The recipe of a tensor, or of what it is a view of; None where it has to be kept."""
    known = _known.get()
    recipe = None if known is None else known.get(tensor.untyped_storage())
    if recipe is None or tensor._version != recipe.version or tensor.dtype != recipe.dtype:
        return None
    return recipe


@contextmanager
def _made_again() -> Iterator[None]:
    pack: Any = _pack
    with recording(), saved_tensors_hooks(pack, _unpack):
        yield


def selective(turn: Callable[..., Any]) -> Callable[..., Any]:
    """`turn`, whose backward makes the results of norms and gates again. Values and gradients are
    the same to the last bit."""

    def run(*args: Any, **options: Any) -> Any:
        with _made_again():
            return turn(*args, **options)

    return run


def _pack(tensor: Tensor) -> Tensor | _Saved:
    recipe = recipe_of(tensor)
    if recipe is None:
        return tensor
    recipe.uses += 1
    return _Saved(recipe, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    return saved.recipe.again().as_strided(saved.size, saved.stride, saved.offset)


def _versions(args: tuple[Any, ...]) -> list[int]:
    return [x._version for x in args if isinstance(x, Tensor)]
