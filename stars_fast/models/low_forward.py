"""Linear maps of a module that go, for a while, through 16-bit copies of their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stars_fast import functional
from stars_fast.models.hooks import is_hooked
from stars_fast.ops.low_weights import LowWeights


class LowForward:
    """The `forward` of a linear map through a copy of its weight.

    Attributes:
        low: of this map.
        joint: of it and others.
        maps: those of `joint`, in its order.
    """

    def __init__(self, module: nn.Linear, low: LowWeights) -> None:
        self.module = module
        self.low = self.joint = low
        self.maps: tuple[nn.Module, ...] = (module,)

    def __call__(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return functional.low_linear(input, self.low)
        return type(self.module).forward(self.module, input)

    @property
    def is_current(self) -> bool:
        """Whether the copy is of the parameters that the module has now, these are trained or
        frozen as they were, and no hook waits for a gradient, which autograd is not given."""
        given = [p for p in (self.module.weight, self.module.bias) if p is not None]
        known = [*self.low.weights, *self.low.biases]
        return len(given) == len(known) and all(
            p is q
            and p.requires_grad == self.low.trained
            and not (p._backward_hooks or p._post_accumulate_grad_hooks)
            for p, q in zip(given, known, strict=True)
        )


def joint_low(maps: Sequence[nn.Module], x: Tensor) -> LowWeights | None:
    """The copy that these maps of x share, in this order; None where they are to be called one by
    one."""
    found = vars(maps[0]).get("forward")
    if type(found) is not LowForward or found.maps != tuple(maps):
        return None
    for each in maps:
        if type(vars(each).get("forward")) is not LowForward or is_hooked(each):
            return None
    return found.joint if torch.is_autocast_enabled(x.device.type) else None
