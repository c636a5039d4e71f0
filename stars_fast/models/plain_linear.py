"""Linear maps, and what may stand in for them."""

from typing import TypeGuard

from torch import Tensor, nn

from stars_fast import functional
from stars_fast.dual.tensor import Dual


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is its weight and bias and nothing else: no adapter, no hook, not
    quantised or sharded by itself."""
    return type(module) is nn.Linear and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    )


def project(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`; a pair that goes through a plain linear map takes the short way to it."""
    if type(x) is Dual and is_plain_linear(module):
        return functional.linear(x, module.weight, module.bias)
    return module(x)


def project_heads(module: nn.Module, x: Tensor, width: int) -> Tensor:
    """`module(x)` in heads, [B, S, D] -> [B, H, S, width]; a pair as in `project`."""
    if type(x) is Dual and is_plain_linear(module):
        return functional.linear_heads(x, module.weight, module.bias, width)
    return functional.split_heads(module(x), width)
