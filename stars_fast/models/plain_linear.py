"""Linear maps, and what may stand in for them or for their weights."""

from typing import TypeGuard

from torch import Tensor, nn

from stars_fast import functional
from stars_fast.dual.tensor import Dual
from stars_fast.models.hooks import is_hooked
from stars_fast.models.low_forward import joint_low


def is_plain(module: nn.Module) -> bool:
    """Whether the weights of a module may be read without calling it: no hook waits for the call
    (`hooks.is_hooked`), its `forward` is its class's (accelerate puts another in place that
    fetches weights from elsewhere), and they are plain tensors, not quantised or sharded ones."""
    if is_hooked(module) or "forward" in vars(module):
        return False
    # What a subclass of tensors made of others has to define: torchao's, DTensor, ...
    return not any(hasattr(weight, "__tensor_flatten__") for weight in module._parameters.values())


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a module is its weight and bias and nothing else: no adapter, no hook, not
    quantised, sharded or kept elsewhere."""
    return type(module) is nn.Linear and is_plain(module)


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


def project_attention(
    q: nn.Module, k: nn.Module, v: nn.Module, x: Tensor, width: int, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """`project_heads` of queries, keys and values, the first two turned; maps that share a copy of
    their weights are one node of the graph."""
    low = joint_low((q, k, v), x)
    if low is not None:
        return functional.low_heads(x, low, width, tables)
    turned = (project_heads(each, x, width, tables) for each in (q, k))
    return *turned, project_heads(v, x, width)


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
    """down(f(gate(x)) * up(x)); a pair as in `project`, where no map has a bias. Gate and up that
    share a copy of their weights are one node of the graph."""
    low = joint_low((gate, up), x)
    if low is not None:
        return down(functional.low_gated(x, low, activation))
    if type(x) is Dual and _is_matrix(gate) and _is_matrix(up) and _is_matrix(down):
        return functional.gated_mlp(x, gate.weight, up.weight, down.weight, activation)
    return project(down, functional.gated(project(gate, x), project(up, x), activation))
