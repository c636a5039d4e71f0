"""Linear maps, and what may stand in for them."""

from torch import Tensor, nn

from stars_fast import functional
from stars_fast.dual.tensor import Dual


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is its weight and bias and nothing else: no adapter, no hook, not
    quantised or sharded by itself."""
    return type(module) is nn.Linear and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    )


def project(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`; a pair that goes through a plain linear map takes the short way to it."""
    if type(x) is Dual and isinstance(module, nn.Linear) and is_plain_linear(module):
        return functional.linear(x, module.weight, module.bias)
    return module(x)
