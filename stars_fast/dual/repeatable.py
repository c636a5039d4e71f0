"""A block held still: each call draws the same random numbers and finds the same buffers, so that
several products are with one Jacobian."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stars_fast.dual.block_modules import modules_of
from stars_fast.dual.graphed_block import GraphedBlock


class RepeatableBlock:
    """`block`, whose first call runs as it is; each later one begins with the random generators and
    the buffers of its modules as the first found them, and leaves them as it found them.

    Held are the global generators of the CPU and of the state's device, generators among the
    arguments or on the modules, and buffers of blocks in training mode (running statistics, the
    vectors of a spectral norm).
    """

    def __init__(self, block: Callable[..., Any]) -> None:
        self.func = block
        self._start: _Start | None = None

    def __call__(self, h: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._start is None:
            self._start = _Start(self.func, h.device, (args, kwargs))
            return self.func(h, *args, **kwargs)
        with self._start.again():
            return self.func(h, *args, **kwargs)


def repeatable(block: Callable[..., Any]) -> Callable[..., Any]:
    """The block held still; as it is where it is already, or is a captured graph."""
    return block if isinstance(block, (RepeatableBlock, GraphedBlock)) else RepeatableBlock(block)


class _Start:
    """The random states and buffers that a call finds."""

    def __init__(self, block: Callable[..., Any], device: torch.device, arguments: Any) -> None:
        modules = list(modules_of(block))
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generators.append(torch.cuda.default_generators[index])
        holders = [each for module in modules for each in module.__dict__.values()]
        for each in (*tree_leaves(arguments), *holders):
            if isinstance(each, torch.Generator) and each not in self.generators:
                self.generators.append(each)
        self.states = [generator.get_state() for generator in self.generators]
        self.buffers: list[tuple[nn.Module, str, Tensor, int, Tensor]] = []
        if any(module.training for module in modules):
            self.buffers = [
                (module, name, buffer, _version(buffer), buffer.detach().clone())
                for module in modules
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]

    @contextmanager
    def again(self) -> Iterator[None]:
        states = [generator.get_state() for generator in self.generators]
        changed = [
            (module, name, module._buffers[name], value)
            for module, name, buffer, version, value in self.buffers
            if module._buffers.get(name) is not buffer or _version(buffer) != version
        ]
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)
        for module, name, _, value in changed:
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
            for module, name, now, _ in changed:
                module._buffers[name] = now


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
