"""Backends of the ops: one schema an op, several implementations, one switch.

    torch     plain PyTorch: any device, any dtype
    cpp       C++ of `csrc/` on the CPU: fp32, bf16, fp64
    triton    Triton on CUDA: fp32, fp16, bf16 (on the CPU in Triton's interpreter)
    cuda      CUDA C++ of `csrc/`, the norms: fp32, fp16, bf16

Each op is defined through torch.library once for every compiled backend, as the overload of that
name: `torch.ops.stars_fast.norm.cpp`, `.triton`, `.cuda`. These raw ops have no derivative: the
public functions of `ops/` wrap them in an autograd.Function. `STARS_FAST_BACKEND=torch` (or cpp,
triton, cuda) in the environment, or `backend("torch")` in code, forces one for tests and reports.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("torch", "cpp", "triton", "cuda")

# x and grad are stacks [2, ..., D] with `dual`, ordinary tensors [..., D] without. Statistics and
# parameter gradients are fp32 (fp64 for fp64). Results are contiguous and have x's dtype.
SCHEMAS = {
    # RMSNorm, or LayerNorm with `centre`, over the last dimension.
    "norm": "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centre, bool dual) -> Tensor",
    # Parameter gradients that are not asked for are of shape [0].
    "norm_backward": "(Tensor grad, Tensor x, Tensor? weight, float eps, bool centre, bool dual, "
    "bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)",
    # h = residual + RMSNorm(branch) (or + branch without weight_out), x = RMSNorm(h) -> h, x.
    "sandwich": "(Tensor branch, Tensor residual, Tensor? weight_out, Tensor weight_in, "
    "float eps_out, float eps_in, bool dual) -> (Tensor, Tensor)",
    # -> branch_bar ([0] without weight_out: it is residual_bar), residual_bar, weight_out_bar ([0]
    # without), weight_in_bar.
    "sandwich_backward": "(Tensor h_bar, Tensor x_bar, Tensor branch, Tensor h, "
    "Tensor? weight_out, Tensor weight_in, float eps_out, float eps_in, bool dual) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    # f(x) for a key of `pointwise.DERIVATIVES`.
    "pointwise": "(Tensor x, str name, bool dual) -> Tensor",
    "pointwise_backward": "(Tensor grad, Tensor x, str name, bool dual) -> Tensor",
    # f(g) u.
    "gated": "(Tensor g, Tensor u, str name, bool dual) -> Tensor",
    "gated_backward": "(Tensor grad, Tensor g, Tensor u, str name, bool dual) -> (Tensor, Tensor)",
    # Over the last dimension; the backward takes the result.
    "softmax": "(Tensor x, bool dual) -> Tensor",
    "softmax_backward": "(Tensor grad, Tensor y, bool dual) -> Tensor",
    # x [N, B, H, S, D], cos and sin [B or 1, S, D]: x cos + rotate_half(x) sin, or with `transpose`
    # the transpose of that map. The result has the memory order [N, B, S, H, D].
    "rotary": "(Tensor x, Tensor cos, Tensor sin, bool transpose) -> Tensor",
    # Sum of squares over the last dimension, in fp32: [..., D] -> [...].
    "row_squares": "(Tensor x) -> Tensor",
    "row_squares_backward": "(Tensor grad, Tensor x) -> Tensor",
    # Standard normal numbers [rows, width] of a counter-based generator, never stored: the sums of
    # their squares by row, and h [..., D] stacked with factor [...] times them. seed: int64 [1].
    "normal_squares": "(Tensor seed, int rows, int width) -> Tensor",
    "seed_stack": "(Tensor h, Tensor seed, Tensor factor) -> Tensor",
    # q [2, B, H, Sq, D], k and v [2, B, Hkv, Sk, D]; query i sees keys [spans[b, i, 0],
    # spans[b, i, 1]), key_spans [B or 1, Sk, 2] is the same seen from the keys; `causal` without
    # spans: key j <= query i. -> out (memory order [2, B, Sq, H, D]), lse [2, B, H, Sq] and mu [B,
    # H, Sq] in fp32, whatever the backward needs of the rows.
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor? spans, Tensor? key_spans, bool causal, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    # `exact`: every query in key_spans[b, j] sees key j.
    "attention_backward": "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor mu, Tensor? spans, Tensor? key_spans, bool causal, float scale, bool exact=False) -> "
    "(Tensor, Tensor, Tensor)",
    # Attention between its products, in place: logits s and s_dot [B, H, Sq, Sk] become the weights
    # p and p_dot, exactly 0 outside spans [B or 1, Sq, 2]; the cotangents dp and dp_dot of those
    # become the cotangents of s and s_dot.
    "attention_weights": "(Tensor(a!) s, Tensor(b!) s_dot, Tensor spans) -> ()",
    "attention_weights_backward": "(Tensor(a!) dp, Tensor(b!) dp_dot, Tensor p, Tensor p_dot, "
    "Tensor spans) -> ()",
}

_DTYPES = {
    "cpp": {torch.float32, torch.bfloat16, torch.float64},
    "triton": {torch.float32, torch.float16, torch.bfloat16},
    "cuda": {torch.float32, torch.float16, torch.bfloat16},
}
# Which compiled backend answers by default, best first; an op without one runs in plain PyTorch.
_DEFAULT = {"cpu": ("cpp",), "cuda": ("triton", "cuda")}

_library = torch.library.Library("stars_fast", "DEF")
_plain: dict[str, Callable[..., Any]] = {}
_compiled: dict[tuple[str, str, str], Callable[..., Any]] = {}
_loaded: set[str] = set()
_forced: str | None = None
_watcher: Callable[[str], None] | None = None
_from_environment: str | None = None
for _name, _schema in SCHEMAS.items():
    for _backend in BACKENDS[1:]:
        _library.define(f"{_name}.{_backend}{_schema}")

# Elementwise functions that a backend has, where it does not have all.
_GATES = frozenset(("silu", "gelu", "gelu_tanh", "relu", "identity"))
_FUNCTIONS = {
    (name, backend): _GATES for name in ("gated", "gated_backward") for backend in BACKENDS
}


def plain(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: this function implements the op `name` in plain PyTorch, for every tensor. It
    also tells torch.compile the shapes that the compiled backends return."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _plain[name] = shapes(name)(function)
        return function

    return register


def shapes(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: this function gives the shapes of the results of the op `name`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for backend in BACKENDS[1:]:
            torch.library.register_fake(f"stars_fast::{name}.{backend}", function, lib=_library)
        return function

    return register


def compiled(name: str, x: Tensor, function: str = "") -> Callable[..., Any] | None:
    """The compiled op `name` for tensors like x, None where there is none. `function` is the name
    of the elementwise function that it is to compute."""
    if _from_environment is not None:
        _read_environment()
    if _forced == "torch":
        return None
    device = x.device.type
    if device not in _loaded:
        _load(device)
    for backend in _DEFAULT.get(device, ()) if _forced is None else (_forced,):
        found = _compiled.get((name, backend, device))
        if found is not None and x.dtype in _DTYPES[backend]:
            known = _FUNCTIONS.get((name, backend))
            if known is None or function in known:
                if _watcher is not None:
                    _watcher(backend)
                return found
    return None


def implementation(name: str, x: Tensor, function: str = "") -> Callable[..., Any]:
    """The function that computes the op `name` for tensors like x: compiled, or plain PyTorch."""
    found = compiled(name, x, function)
    if found is None:
        if _watcher is not None:
            _watcher("torch")
        return _plain[name]
    return found


def watch(watcher: Callable[[str], None] | None) -> None:
    """Tell `watcher` the backend of each op that is picked from now on."""
    global _watcher
    _watcher = watcher


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Force a backend for the ops inside, in the whole process; None gives the default back.

    An op, device or dtype that the backend does not have runs in plain PyTorch.

    Raises:
        ValueError: `name` is unknown.
        RuntimeError: the backend can't be used on this machine.
    """
    global _forced
    before = _forced
    _forced = _checked(name)
    try:
        yield
    finally:
        _forced = before


def has(backend: str, device: str) -> bool:
    """Whether a compiled backend is there for tensors on `device` ("cpu" or "cuda")."""
    _load(device)
    return any(key[1:] == (backend, device) for key in _compiled)


def dtypes(backend: str) -> frozenset[torch.dtype]:
    """The dtypes that a backend computes with; plain PyTorch takes more than these."""
    return frozenset(_DTYPES.get(backend, {*_DTYPES["cpp"], *_DTYPES["triton"]}))


def _checked(name: str | None) -> str | None:
    if name is None or name == "torch":
        return name
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {name!r}")
    _load("cpu")
    if torch.cuda.is_available():
        _load("cuda")
    if not any(key[1] == name for key in _compiled):
        raise RuntimeError(f"backend: {name!r} can't be used here: {_why_not(name)}")
    return name


def _why_not(name: str) -> str:
    if name == "cpp":
        return "the extension is not built (pip install --no-build-isolation -e . builds it)"
    if name == "triton":
        return "it needs the package triton and a CUDA device (or TRITON_INTERPRET=1)"
    return "it needs a CUDA device and an extension built with STARS_FAST_BUILD=cuda"


def _load(device: str) -> None:
    """Find the compiled implementations for a device, once."""
    if device in _loaded:
        return
    _loaded.add(device)
    try:
        _find(device)
    except ImportError:
        _loaded.discard(device)  # the next call says so again, not plain PyTorch in silence
        raise


def _find(device: str) -> None:
    from stars_fast.ops import extension

    if not extension.load():
        if device == "cpu":  # on CUDA there is Triton
            warnings.warn(
                f"stars_fast: the compiled kernels are not built in {extension.FOLDER}: ops run in "
                "plain PyTorch, slower. `pip install --no-build-isolation -e .` in the source tree "
                "builds them (csrc/README.md).",
                stacklevel=4,
            )
    else:
        native, key = ("cuda", "CUDA") if device == "cuda" else ("cpp", "CPU")
        for name in SCHEMAS:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"stars_fast::{name}.{native}", key):
                _compiled[name, native, device] = _overload(name, native)
    interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cuda" or interpreted:
        _load_triton(device)


def _load_triton(device: str) -> None:
    try:
        from stars_fast.ops.triton import KERNELS
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        warnings.warn(
            "stars_fast: triton is not installed; its ops run in plain PyTorch", stacklevel=2
        )
        return
    for name, function in KERNELS.items():
        _library.impl(f"{name}.triton", function, device.upper())
        _compiled[name, "triton", device] = _overload(name, "triton")


def _overload(name: str, backend: str) -> Callable[..., Any]:
    return getattr(getattr(torch.ops.stars_fast, name), backend)


_from_environment = os.environ.get("STARS_FAST_BACKEND") or None


def _read_environment() -> None:
    """Take STARS_FAST_BACKEND, at the first op: what is there is not known before."""
    global _forced, _from_environment
    name, _from_environment = _from_environment, None
    try:
        _forced = _checked(name)
    except (ValueError, RuntimeError) as error:
        _from_environment = name
        raise type(error)(f"STARS_FAST_BACKEND: {error}") from None
