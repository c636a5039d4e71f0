"""Gradients that stay where they are, reduced in place: what a CUDA graph writes to.

Each parameter's `.grad` is a view of one of a few flat tensors. They are zeroed rather than dropped
before a step, and averaged over the processes after its last backward, without a copy. Beside
`DistributedDataParallel` nothing travels while the backward runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from stars_fast.training.scale.distributed import World

BYTES = 256 * 2**20
"""The most of a flat tensor, but for one parameter that is larger."""


class FlatGradients:
    """The gradients of the parameters of a module that want one.

    Every such parameter has one from then on, zero where nothing reached it.

    Attributes:
        flat: the tensors that the gradients are views of.
    """

    def __init__(self, module: nn.Module, limit: int = BYTES) -> None:
        self.flat: list[torch.Tensor] = []
        self._views: list[tuple[nn.Parameter, torch.Tensor]] = []
        parameters = [p for p in module.parameters() if p.requires_grad]
        for group in _groups(parameters, limit):
            flat = group[0].new_zeros(sum(p.numel() for p in group))
            self.flat.append(flat)
            parts = flat.split([p.numel() for p in group])
            self._views += [(p, part.view(p.shape)) for p, part in zip(group, parts, strict=True)]
        self.zero()

    def zero(self) -> None:
        """Start a step: all gradients are zero, and in their places."""
        for parameter, view in self._views:
            parameter.grad = view
        for flat in self.flat:
            flat.zero_()

    def average(self, world: World) -> None:
        """Average over the processes of a run; every process calls it."""
        if world.size == 1:
            return
        for flat in self.flat:
            dist.all_reduce(flat.div_(world.size))


def share_state(module: nn.Module, world: World) -> None:
    """Give all processes the parameters and buffers of the first, as DistributedDataParallel does
    when it is made."""
    if world.size == 1:
        return
    tensors: Iterable[torch.Tensor] = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0)


def _groups(parameters: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Parameters of one dtype and device together, up to `limit` bytes."""
    groups: list[list[nn.Parameter]] = []
    newest: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for p in parameters:
        key = p.dtype, p.device
        group = newest.get(key)
        if group is None or sum(each.nbytes for each in group) + p.nbytes > limit:
            group = newest[key] = []
            groups.append(group)
        group.append(p)
    return groups
