"""Every op with its reference, PyTorch's own and inputs of a given size: what is checked and timed;
and the check, against fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast import ops
from stars_fast.ops import library, reference

Function = Callable[..., Tensor]

# Relative error in the L2 norm, of outputs and cotangents, on inputs of ordinary size: a few
# roundings of the result; of keys with a large offset and so large logits 8 times that.
_TOLERANCE = {
    torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3
}  # fmt: skip


@dataclass(frozen=True)
class OpCase:
    """`op(*stacks, *plains)` on stacks [2, ...] is the dual of `ref(*primals, *plains)`, which
    PyTorch computes by `torch_op`.

    `moved` counts the elements that the dual reads and writes, forward and backward, for bandwidths
    (of the sandwich with the stacking of its two results).
    """

    name: str
    op: Function
    ref: Function
    torch_op: Function
    stacks: tuple[Tensor, ...]
    plains: tuple[Tensor, ...]
    moved: tuple[int, int]

    def tolerance(self, dtype: torch.dtype) -> float:
        """The largest relative error of an output or cotangent that is not wrong."""
        return _TOLERANCE[dtype] * (8 if "offset" in self.name else 1)


def _pair(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack(outputs, 1)


def row_cases(rows: int, width: int, hidden: int) -> list[OpCase]:
    """Norms, sandwich, elementwise ops and squares at [2, rows, width] ([2, rows, hidden])."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, y, w, w2 = draw(2, rows, width), draw(2, rows, width), draw(width), draw(width)
    g, u = draw(2, rows, hidden), draw(2, rows, hidden)
    n, m = x.numel(), g.numel()

    def chain(branch: Tensor, residual: Tensor, w_out: Tensor, w_in: Tensor) -> Tensor:
        h = residual + reference.rms_norm(branch, w_out, 1e-6)
        return torch.stack((h, reference.rms_norm(h, w_in, 1e-6)))

    def torch_chain(branch: Tensor, residual: Tensor, w_out: Tensor, w_in: Tensor) -> Tensor:
        h = residual + F.rms_norm(branch, (width,), w_out, 1e-6)
        return torch.stack((h, F.rms_norm(h, (width,), w_in, 1e-6)))

    return [
        OpCase(
            "rms_norm",
            lambda x, w: ops.rms_norm(x, w, 1e-6),
            lambda x, w: reference.rms_norm(x, w, 1e-6),
            lambda x, w: F.rms_norm(x, (width,), w, 1e-6),
            (x,),
            (w,),
            (2 * n, 3 * n),
        ),
        OpCase(
            "layer_norm",
            lambda x, w, b: ops.layer_norm(x, w, b, 1e-5),
            lambda x, w, b: reference.layer_norm(x, w, b, 1e-5),
            lambda x, w, b: F.layer_norm(x, (width,), w, b, 1e-5),
            (x,),
            (w, w2),
            (2 * n, 3 * n),
        ),
        OpCase(
            "sandwich",
            lambda x, y, w, w2: _pair(ops.sandwich(x, y, w, w2, 1e-6, 1e-6)),
            chain,
            torch_chain,
            (x, y),
            (w, w2),
            (8 * n, 6 * n),
        ),
        OpCase(
            "swiglu",
            ops.gated,
            lambda g, u: reference.gated(g, u, "silu"),
            lambda g, u: F.silu(g) * u,
            (g, u),
            (),
            (3 * m, 5 * m),
        ),
        OpCase(
            "gelu",
            lambda x: ops.pointwise(x, "gelu"),
            lambda x: reference.pointwise(x, "gelu"),
            F.gelu,
            (g,),
            (),
            (2 * m, 3 * m),
        ),
        OpCase(
            "softmax",
            ops.softmax,
            reference.softmax,
            lambda x: F.softmax(x, -1),
            (x,),
            (),
            (2 * n, 3 * n),
        ),
    ]


def rotary_case(batch: int, heads: int, length: int, width: int) -> OpCase:
    """Rotation of [2, batch, heads, length, width] by tables that are rounded to its dtype."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, batch, length, heads, width, generator=generator).transpose(2, 3)
    cos, sin = (torch.randn(1, length, width, generator=generator) for _ in range(2))
    n = x.numel()
    tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def table(x: Tensor) -> tuple[Tensor, Tensor]:
        key = x.device, x.dtype
        if key not in tables:
            tables[key] = cos.to(x), sin.to(x)
        return tables[key]

    return OpCase(
        "rotary",
        lambda x: ops.rotary(x, *table(x)),
        lambda x: reference.rotary(x, *table(x)),
        lambda x: reference.rotary(x, *table(x)),
        (x,),
        (),
        (2 * n, 2 * n),
    )


def attention_case(
    name: str,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    width: int,
    documents: list[int] | None = None,
    offset: float = 0.0,
) -> OpCase:
    """Causal attention; packed documents of these lengths with `documents`; keys whose tangent has
    a common part of `offset` standard deviations with `offset`."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(2, batch, length, n, width, generator=generator).transpose(2, 3)
        for n in (heads, kv_heads, kv_heads)
    )
    k[1] += offset * torch.randn(width, generator=generator)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    bounds = None
    spans: dict[torch.device, ops.Spans] = {}
    masks: dict[torch.device, Tensor] = {}
    if documents is not None:
        bounds = torch.tensor([0, *documents]).cumsum(0)
        owner = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        mask &= owner[:, None] == owner[None, :]

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if bounds is None:
            return ops.attention(q, k, v, causal=True)
        if q.device not in spans:
            cu = bounds.to(q.device)
            spans[q.device] = ops.Spans.of_documents(cu, cu, length, length, True)
        return ops.attention(q, k, v, spans=spans[q.device])

    def torch_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if bounds is not None and q.device not in masks:
            masks[q.device] = mask.to(q.device)
        seen = masks.get(q.device)
        return F.scaled_dot_product_attention(
            q, k, v, seen, is_causal=bounds is None, enable_gqa=heads != kv_heads
        )

    moved = 2 * q.numel() + 2 * k.numel()
    return OpCase(
        name,
        op,
        lambda q, k, v: reference.attention(q, k, v, mask.to(q.device)),
        torch_op,
        (q, k, v),
        (),
        (moved, 2 * moved),
    )


def attention_cases(small: bool) -> list[OpCase]:
    """Widths, grouped heads, odd lengths, packed documents, offset keys."""
    if small:
        return [
            attention_case("attention-33", 1, 2, 1, 33, 16),
            attention_case("attention-packed", 1, 2, 2, 40, 16, [0, 1, 17, 22]),
        ]
    cases = [
        attention_case(f"attention-d{d}", 2, 4, 2, 257, d) for d in (16, 40, 64, 80, 96, 128, 256)
    ]
    return [
        *cases,
        attention_case("attention-1", 2, 2, 2, 1, 64),
        attention_case("attention-1000", 1, 4, 4, 1000, 128),
        attention_case("attention-packed", 1, 4, 2, 700, 128, [0, 1, 130, 300, 269]),
        attention_case("attention-packed-64", 1, 4, 2, 700, 64, [0, 1, 130, 300, 269]),
        attention_case("attention-offset", 1, 4, 4, 512, 128, None, 16.0),
    ]


def results(
    case: OpCase, function: Callable[..., Any], dtype: torch.dtype, device: str, stacked: bool
) -> list[Tensor]:
    """Output, its tangent and the cotangents of all inputs (halves apart), for one cotangent.

    With `stacked` of the dual `function` in `dtype`; else of the ordinary `function` in fp64, on
    inputs that are rounded to `dtype`, by torch.func.jvp and autograd.
    """
    rounded = [t.to(device, dtype) for t in (*case.stacks, *case.plains)]
    wide = [t if stacked else t.double() for t in rounded]
    leaves = [t.detach().requires_grad_() for t in wide]
    duals = len(case.stacks)
    if stacked:
        pair = tuple(function(*leaves).unbind(0))
    else:
        pair = torch.func.jvp(
            lambda *x: function(*x, *leaves[duals:]),
            tuple(s[0] for s in leaves[:duals]),
            tuple(s[1] for s in leaves[:duals]),
        )
    generator = torch.Generator().manual_seed(3)
    bars = [torch.randn(y.shape, generator=generator).to(device, dtype).to(y.dtype) for y in pair]
    grads = torch.autograd.grad(pair, leaves, bars)
    halves = [half for grad in grads[:duals] for half in grad]
    return [*pair, *halves, *grads[duals:]]


@contextmanager
def answered() -> Iterator[set[str]]:
    """The backends that answer inside."""
    seen: set[str] = set()
    library.watch(seen.add)
    try:
        yield seen
    finally:
        library.watch(None)


def backends(device: str, dtype: torch.dtype) -> list[str]:
    """Those that are here for tensors of this device and dtype; Triton's interpreter is none, it
    multiplies the bits of bf16 and takes its time."""
    return [
        name
        for name in library.BACKENDS
        if dtype in library.dtypes(name)
        and (name == "torch" or library.has(name, device))
        and (name, device) != ("triton", "cpu")
    ]


def errors(case: OpCase, dtype: torch.dtype, device: str, backend: str) -> list[float] | None:
    """Relative errors of `results` by a backend against fp64; None where plain PyTorch stood in."""
    with ops.backend(backend), answered() as seen:
        found = results(case, case.op, dtype, device, stacked=True)
    if backend not in ("torch", *seen):
        return None
    exact = results(case, case.ref, dtype, device, stacked=False)
    return [_error(mine.double(), truth) for mine, truth in zip(found, exact, strict=True)]


def _error(mine: Tensor, truth: Tensor) -> float:
    difference, size = (mine - truth).norm().item(), truth.norm().item()
    if math.isnan(difference):  # which no maximum would show
        return math.inf
    # Gradients that vanish identically have nothing to be relative to.
    return difference / size if size > 1e-6 * mine.numel() ** 0.5 else difference
