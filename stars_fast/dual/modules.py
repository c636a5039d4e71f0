"""Modules known by their structure: an RMSNorm, a gated MLP or an activation of any library reaches
one fused op.

A module is recognised by what it computes: its class's `forward` is run on a stand-in with the
module's settings and random weights, on inputs of all sizes, and compared with the formula. A class
with such a module gets a `forward` that looks at its input first: a Dual, in a module whose own
stand-in agreed, takes the fused op; everything else runs the class's own code, unchanged. That is
done on the class, once, because a checkpointed block calls its modules again during backward, long
after the pass that met them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stars_fast import ops
from stars_fast.dual.registry import report
from stars_fast.dual.rotary import adopt_rotary
from stars_fast.dual.tensor import Dual
from stars_fast.ops import reference

Forward = Callable[..., Any]

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_MLP_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_ACT_NAMES = ("act_fn", "act", "activation_fn")
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.Size)
# What nn.Module itself keeps in an instance.
_OWN = frozenset(nn.Module().__dict__)

_seen: set[type] = set()


def adopt(block: Any) -> None:
    """Look at the classes of the modules that `block` holds and fuse those that are known."""
    for module in modules_of(block):
        cls = type(module)
        if cls not in _seen:
            _seen.add(cls)
            if cls.__module__.startswith("torch."):
                continue
            adopt_rotary(cls)
            if _recognise(cls.forward, module) is not None:
                _install(cls)


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


def _install(cls: type) -> None:
    original = cls.forward  # type: ignore[attr-defined]
    known: WeakKeyDictionary[nn.Module, tuple[Any, Forward | None]] = WeakKeyDictionary()

    def fused_of(module: nn.Module) -> Forward | None:
        settings = _settings(module)
        found = known.get(module)
        if found is None or found[0] != settings:
            found = known[module] = (settings, _recognise(original, module))
        return found[1]

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is Dual and args[0].dim() in (2, 3, 4):
            fused = fused_of(self)
            result = None if fused is None else fused(self, args[0])
            if result is not None:
                return result
        return original(self, *args, **kwargs)

    cls.forward = forward  # type: ignore[attr-defined]


def _recognise(forward: Forward, module: nn.Module) -> Forward | None:
    """The fused op for a module whose `forward` computes a known formula, else None."""
    settings = _settings(module)
    if settings is None:
        return None
    return (
        _as_rms_norm(forward, module)
        or _as_gated_mlp(forward, module)
        or _as_activation(forward, module)
    )


def _settings(module: nn.Module) -> Any:
    """The plain values that an instance holds besides its weights; None where it holds anything
    that a trial run could change."""
    own = [(k, v) for k, v in module.__dict__.items() if k not in _OWN or k == "training"]
    if any(not isinstance(v, _PLAIN) and not _is_config(v) for _, v in own):
        return None
    acts = [(k, id(m), m.training) for k, m in module._modules.items() if m is not None]
    return tuple((k, v if isinstance(v, _PLAIN) else id(v)) for k, v in own), tuple(acts)


def _is_config(value: Any) -> bool:
    return type(value).__name__.endswith("Config") or (
        callable(value) and not isinstance(value, nn.Module)
    )


def _trial(forward: Forward, module: nn.Module, x: Tensor, **parts: dict) -> Tensor | None:
    """What `forward` makes of x on a shallow copy of the module with other parameters or children:
    neither weights nor hooks of the original take part. None where it can't be called like this, or
    draws random numbers."""
    clone = type(module).__new__(type(module))
    clone.__dict__.update({**module.__dict__, **parts})
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            torch.autocast(x.device.type, enabled=False),
        ):
            before = torch.get_rng_state()
            y = forward(clone, x)
            if not torch.equal(before, torch.get_rng_state()):
                return None
    except Exception:  # a stranger's forward may raise anything; then it is simply not known
        return None
    return y if isinstance(y, Tensor) else None


def _same(y: Tensor | None, expected: Tensor) -> bool:
    """Equal row by row, to fp32: rows differ in size by many orders."""
    if y is None or y.shape != expected.shape:
        return False
    difference = (y.double() - expected.double()).flatten(0, -2).norm(dim=-1)
    size = expected.double().flatten(0, -2).norm(dim=-1)
    return bool((difference <= 1e-5 * size).all())


def _rows(width: int) -> Tensor:
    """[3, 4, width]: random rows from 1e-3 to 1e4, so that a clamp or another eps shows."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 4, 12).view(3, 4, 1)
    return torch.randn(3, 4, width, generator=generator) * sizes


# -- RMSNorm


def _as_rms_norm(forward: Forward, module: nn.Module) -> Forward | None:
    if set(module._parameters) != {"weight"} or module._buffers or module._modules:
        return None
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1:
        return None
    eps_name = next((n for n in _EPS_NAMES if isinstance(getattr(module, n, None), float)), None)
    if eps_name is None:
        return None
    eps = getattr(module, eps_name)
    x = _rows(weight.shape[0])
    trial_weight = torch.randn(len(weight), generator=torch.Generator().manual_seed(1))
    parameters = {"weight": trial_weight}
    for offset in (0.0, 1.0):
        expected = reference.rms_norm(x, trial_weight + offset, eps)
        if all(
            _same(_trial(forward, module, part, _parameters=parameters), whole)
            for part, whole in ((x, expected), (x[0], expected[0]))
        ):
            break
    else:
        return None
    narrow = _trial(forward, module, x.bfloat16(), _parameters=parameters)
    keeps_dtype = narrow is not None and narrow.dtype == torch.bfloat16
    name = type(module).__name__

    def fused(module: Any, x: Dual) -> Dual | None:
        weight = module.weight if offset == 0.0 else module.weight + offset
        dtype, weight_dtype = x.stack.dtype, weight.dtype
        if dtype != weight_dtype:
            if weight_dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
                return None  # a mixture that the trials did not cover
            dtype = dtype if keeps_dtype else weight_dtype
        result = Dual(ops.rms_norm(x.stack, weight, eps, dtype))
        report(name, "fused")
        return result

    return fused


# -- activations and gated MLPs


def _activation_name(act: Any) -> str | None:
    """Which of the known functions an activation (module or function) computes."""
    x = _points()
    try:
        with torch.no_grad():
            y, narrow = act(x), act(x.bfloat16())
    except Exception:  # not a plain function of one tensor
        return None
    keeps_dtype = isinstance(narrow, Tensor) and narrow.dtype == torch.bfloat16
    return _name_of(x, y) if keeps_dtype else None


def _points() -> Tensor:
    far = torch.cat((torch.logspace(1, 4, 7), torch.logspace(8, 30, 3)))
    return torch.cat((torch.linspace(-6, 6, 97), far, -far))


def _name_of(x: Tensor, y: Any) -> str | None:
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    for name in _ACTIVATIONS:
        if torch.allclose(y, reference.pointwise(x, name), rtol=1e-5, atol=1e-6):
            return name
    return None


def _as_activation(forward: Forward, module: nn.Module) -> Forward | None:
    """An activation written out from parts, such as the tanh GELU of GPT-2."""
    if module._parameters or module._buffers or module._modules:
        return None
    x = _points().view(3, 39)  # 97 + 20 points
    activation = _name_of(x, _trial(forward, module, x))
    narrow = _trial(forward, module, x.bfloat16())
    if activation is None or narrow is None or narrow.dtype != torch.bfloat16:
        return None
    name = type(module).__name__

    def fused(module: Any, x: Dual) -> Dual:
        result = Dual(ops.pointwise(x.stack, activation))
        report(name, "fused")
        return result

    return fused


def _as_gated_mlp(forward: Forward, module: nn.Module) -> Forward | None:
    if module._parameters or module._buffers:
        return None
    for names in _MLP_NAMES:
        if set(names) <= set(module._modules):
            return _match_mlp(forward, module, names)
    return None


def _match_mlp(forward: Forward, module: nn.Module, names: tuple[str, str, str]) -> Forward | None:
    act_name = next((n for n in _ACT_NAMES if hasattr(module, n)), None)
    if set(module._modules) - set(names) - {act_name}:
        return None
    activation = _activation_name(F.silu if act_name is None else getattr(module, act_name))
    if activation is None:
        return None
    generator = torch.Generator().manual_seed(1)
    gate, up, down = (torch.randn(shape, generator=generator) for shape in ((6, 4), (6, 4), (4, 6)))
    children = dict(module._modules)
    for name, weight in zip(names, (gate, up, down), strict=True):
        child = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        child.weight = nn.Parameter(weight, requires_grad=False)
        children[name] = child
    x = _rows(4)
    expected = F.linear(reference.gated(F.linear(x, gate), F.linear(x, up), activation), down)
    for part, whole in ((x, expected), (x[0], expected[0])):
        if not _same(_trial(forward, module, part, _modules=children), whole):
            return None
    name = f"{type(module).__name__}:{activation}*up"

    def fused(module: Any, x: Dual) -> Any:
        g, u = getattr(module, names[0])(x), getattr(module, names[1])(x)
        hidden = Dual(ops.gated(g.stack, u.stack, activation))
        report(name, "fused")
        return getattr(module, names[2])(hidden)

    return fused
