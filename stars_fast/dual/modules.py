"""Modules known by their structure: an RMSNorm or a gated MLP of any library reaches one fused op.

A class is recognised by what it computes: its own `forward` is run once on a small stand-in with
random weights and compared with the formula. From then on the `forward` of that class looks at its
input first: a Dual takes the fused op, anything else the class's own code, unchanged. The change is
made on the class, once, because a checkpointed block calls its modules again during backward, long
after the pass that met them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast import ops
from stars_fast.dual.registry import report
from stars_fast.dual.tensor import Dual
from stars_fast.ops import reference

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_MLP_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")

_seen: set[type] = set()


def adopt(block: Any) -> None:
    """Look at the classes of the modules that `block` holds and fuse those that are known."""
    for module in modules_of(block):
        cls = type(module)
        if cls in _seen:
            continue
        _seen.add(cls)
        if cls.__module__.startswith("torch."):
            continue
        fused = _as_rms_norm(module) or _as_gated_mlp(module)
        if fused is not None:
            _install(cls, fused)


def modules_of(block: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The modules in a module, a bound method, a partial or a closure."""
    if isinstance(block, nn.Module):
        yield from block.modules()
    elif depth:
        inner = [getattr(block, "__self__", None), getattr(block, "func", None)]
        inner += [cell.cell_contents for cell in getattr(block, "__closure__", None) or ()]
        for each in inner:
            for part in each if isinstance(each, (list, tuple)) else (each,):
                if part is not None and callable(part):
                    yield from modules_of(part, depth - 1)


def _install(cls: type, fused: Callable[..., Any]) -> None:
    original = cls.forward  # type: ignore[attr-defined]

    @functools.wraps(original)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is Dual and not args and not kwargs:
            result = fused(self, x)
            if result is not None:
                return result
        return original(self, x, *args, **kwargs)

    cls.forward = forward  # type: ignore[attr-defined]


def _stand_in(module: nn.Module, **parts: dict) -> Any:
    """A shallow copy with other parameters or children: running its class's forward on it touches
    neither the weights nor the hooks of the original."""
    clone = type(module).__new__(type(module))
    clone.__dict__.update(module.__dict__)
    clone.__dict__.update(parts)
    clone.__dict__["training"] = False
    return clone


def _probe(module: Any, x: Tensor) -> Tensor | None:
    """What the class's forward makes of x; None where it can't be called like this."""
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            y = type(module).forward(module, x)
    except Exception:  # a stranger's forward may raise anything; then it is simply not known
        return None
    return y if isinstance(y, Tensor) else None


def _same(y: Tensor | None, expected: Tensor) -> bool:
    if y is None or y.shape != expected.shape:
        return False
    return torch.allclose(y.double(), expected.double(), rtol=1e-5, atol=1e-6)


# -- RMSNorm


def _as_rms_norm(module: nn.Module) -> Callable[..., Any] | None:
    if set(module._parameters) != {"weight"} or module._buffers or module._modules:
        return None
    if getattr(module._parameters["weight"], "ndim", 0) != 1:
        return None
    eps_name = next((n for n in _EPS_NAMES if isinstance(getattr(module, n, None), float)), None)
    if eps_name is None:
        return None
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, generator=generator)
    # Small entries, so that a different place of eps shows.
    x = torch.randn(3, 8, generator=generator) * torch.tensor([[1.0], [1e-2], [1e-3]])
    y = _probe(_stand_in(module, _parameters={"weight": weight}), x)
    for offset in (0.0, 1.0):
        if _same(y, reference.rms_norm(x, weight + offset, getattr(module, eps_name))):
            break
    else:
        return None
    mixed = _probe(_stand_in(module, _parameters={"weight": weight}), x.bfloat16())
    keeps_dtype = mixed is not None and mixed.dtype == torch.bfloat16

    def fused(self: Any, x: Dual) -> Dual:
        weight = self.weight if offset == 0.0 else self.weight + offset
        dtype = x.stack.dtype
        if not keeps_dtype:
            dtype = torch.promote_types(dtype, weight.dtype)
        report(type(self).__name__, "fused")
        return Dual(ops.rms_norm(x.stack, weight, getattr(self, eps_name), dtype))

    return fused


# -- gated MLP


def _activation_name(act: Any) -> str | None:
    """Which of the known functions an activation (module or function) computes."""
    x = torch.linspace(-4, 4, 33)
    try:
        with torch.no_grad():
            y = act(x)
    except Exception:  # not a plain function of one tensor
        return None
    return next((n for n in _ACTIVATIONS if _same(y, reference.pointwise(x, n))), None)


def _as_gated_mlp(module: nn.Module) -> Callable[..., Any] | None:
    if module._parameters or module._buffers:
        return None
    for names in _MLP_NAMES:
        if set(names) <= set(module._modules):
            return _match_mlp(module, names)
    return None


def _match_mlp(module: nn.Module, names: tuple[str, str, str]) -> Callable[..., Any] | None:
    act_name = next((n for n in ("act_fn", "act", "activation_fn") if hasattr(module, n)), None)
    extra = set(module._modules) - set(names) - ({act_name} if act_name else set())
    if extra:
        return None
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((6, 4), (6, 4), (4, 6))]
    children = dict(module._modules)
    for name, weight in zip(names, weights, strict=True):
        child = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        child.weight = nn.Parameter(weight, requires_grad=False)
        children[name] = child
    act = F.silu if act_name is None else getattr(module, act_name)
    activation = _activation_name(act)
    if activation is None:
        return None
    x = torch.randn(3, 4, generator=generator)
    gate, up, down = weights
    expected = F.linear(reference.gated(F.linear(x, gate), F.linear(x, up), activation), down)
    if not _same(_probe(_stand_in(module, _modules=children), x), expected):
        return None
    known: dict[Any, str | None] = {}

    def fused(self: Any, x: Dual) -> Any:
        name: str | None = activation
        if act_name is not None:
            act = getattr(self, act_name)
            key = (type(act), repr(act)) if isinstance(act, nn.Module) else act
            if key not in known:
                known[key] = _activation_name(act)
            name = known[key]
        if name is None:
            return None
        g, u = getattr(self, names[0])(x), getattr(self, names[1])(x)
        report(f"{type(self).__name__}:{name}*up", "fused")
        return getattr(self, names[2])(Dual(ops.gated(g.stack, u.stack, name)))

    return fused
