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


def project_heads(
    module: nn.Module, x: Tensor, width: int, tables: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """`module(x)` in heads, [B, S, D] -> [B, H, S, width], turned by the tables (cos, sin) of
    `functional.rotary` where there are any; a pair as in `project`."""
    if type(x) is Dual and is_plain_linear(module):
        return functional.linear_heads(x, module.weight, module.bias, width, tables)
    heads = functional.split_heads(module(x), width)
    return heads if tables is None else functional.rotary(heads, *tables)


def project_merged(module: nn.Module, x: Tensor) -> Tensor:
    """`module` of merged heads, [B, H, S, D] -> [B, S, E]; a pair as in `project`."""
    if type(x) is Dual and is_plain_linear(module):
        return functional.linear_of_heads(x, module.weight, module.bias)
    return module(functional.merge_heads(x))


def _is_matrix(module: nn.Module) -> TypeGuard[nn.Linear]:
    return is_plain_linear(module) and module.bias is None


def gated_mlp(
    gate: nn.Module, up: nn.Module, down: nn.Module, x: Tensor, activation: str
) -> Tensor:
    """down(f(gate(x)) * up(x)); a pair as in `project`, where no map has a bias."""
    if type(x) is Dual and _is_matrix(gate) and _is_matrix(up) and _is_matrix(down):
        return functional.gated_mlp(x, gate.weight, up.weight, down.weight, activation)
    return project(down, functional.gated(project(gate, x), project(up, x), activation))
