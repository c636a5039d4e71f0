"""The modules that a block is made of, and what a pass may not leave on them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from types import CellType, FunctionType
from typing import Any

from torch import nn

from stars_fast.dual.tensor import Dual


def modules_of(block: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The modules in a module, a bound method, a partial, a callable object, a closure, or named as
    globals by a function."""
    if isinstance(block, nn.Module):
        yield from _within(block)
        return
    if not depth or isinstance(block, type):
        return
    inner = [getattr(block, "__self__", None), getattr(block, "func", None)]
    inner += [_held(cell) for cell in getattr(block, "__closure__", None) or ()]
    if isinstance(block, FunctionType):
        named = (block.__globals__.get(name) for name in block.__code__.co_names)
        inner += [each for each in named if not isinstance(each, FunctionType)]
    else:
        inner += getattr(block, "__dict__", {}).values()
    for each in inner:
        parts: Any = (each,)
        if isinstance(each, (list, tuple, dict)):
            parts = each.values() if isinstance(each, dict) else each
        for part in parts:
            if part is not None and callable(part):
                yield from modules_of(part, depth - 1)


def _held(cell: CellType) -> Any:
    """The value of a closure's variable; None where it is not set yet, or any more."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _within(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside, each once: `module.modules()` without its names, which a pass of
    a deep block has no time for."""
    seen = {module}
    todo = [module]
    for each in todo:
        yield each
        for inner in each._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                todo.append(inner)


def release_duals(block: Any) -> None:
    """Leave no Dual behind on the modules of a block: what a forward stored there, such as a
    running mean or an auxiliary loss, becomes its primal."""
    for module in modules_of(block):
        own = module.__dict__
        for key in own.keys() - _TORCHS:
            value = own[key]
            if type(value) in _HOLDERS:
                own[key] = _primals(value)
        if not module._buffers:
            continue
        for key, value in module._buffers.items():
            if type(value) is Dual:
                module._buffers[key] = value.stack[0]


_HOLDERS = frozenset((Dual, list, tuple, dict, defaultdict, OrderedDict, deque))
# Attributes that torch gives every module; the buffers are looked at themselves.
_TORCHS = frozenset(nn.Module().__dict__)


def _primals(value: Any, depth: int = 4) -> Any:
    """The primal of a Dual; a container with the primals of its Duals, and of those in containers
    in it, `depth` of them: the same object where it holds none or can be written."""
    if type(value) is Dual:
        return value.stack[0]
    if not depth or not value:
        return value
    places = value.items() if isinstance(value, dict) else enumerate(value)
    held = [(place, each) for place, each in places if type(each) in _HOLDERS]
    found = {place: new for place, each in held if (new := _primals(each, depth - 1)) is not each}
    if found and type(value) is tuple:
        return tuple(found.get(place, each) for place, each in enumerate(value))
    for place, new in found.items():
        value[place] = new
    return value
