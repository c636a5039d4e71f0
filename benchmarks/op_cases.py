"""Every op with its reference and inputs of a given size: what is checked and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stars_fast import ops
from stars_fast.ops import reference

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """`op(*stacks, *plains)` on stacks [2, ...] is the dual of `ref(*primals, *plains)`.

    `moved` counts the elements read and written, forward and backward, for bandwidths (of the
    sandwich with the stacking of its two results).
    """

    name: str
    op: Function
    ref: Function
    stacks: tuple[Tensor, ...]
    plains: tuple[Tensor, ...]
    moved: tuple[int, int]


def _pair(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack(outputs, 1)


def row_cases(rows: int, width: int, hidden: int) -> list[Case]:
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

    return [
        Case(
            "rms_norm",
            lambda x, w: ops.rms_norm(x, w, 1e-6),
            lambda x, w: reference.rms_norm(x, w, 1e-6),
            (x,),
            (w,),
            (2 * n, 3 * n),
        ),
        Case(
            "layer_norm",
            lambda x, w, b: ops.layer_norm(x, w, b, 1e-5),
            lambda x, w, b: reference.layer_norm(x, w, b, 1e-5),
            (x,),
            (w, w2),
            (2 * n, 3 * n),
        ),
        Case(
            "sandwich",
            lambda *t: _pair(ops.sandwich(*t, 1e-6, 1e-6)),
            chain,
            (x, y),
            (w, w2),
            (8 * n, 6 * n),
        ),
        Case(
            "swiglu",
            ops.gated,
            lambda g, u: reference.gated(g, u, "silu"),
            (g, u),
            (),
            (3 * m, 5 * m),
        ),
        Case(
            "gelu",
            lambda x: ops.pointwise(x, "gelu"),
            lambda x: reference.pointwise(x, "gelu"),
            (g,),
            (),
            (2 * m, 3 * m),
        ),
        Case("softmax", ops.softmax, reference.softmax, (x,), (), (2 * n, 3 * n)),
    ]


def rotary_case(batch: int, heads: int, length: int, width: int) -> Case:
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

    return Case(
        "rotary",
        lambda x: ops.rotary(x, *table(x)),
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
) -> Case:
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
    if documents is not None:
        bounds = torch.tensor([0, *documents]).cumsum(0)
        owner = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        mask &= owner[:, None] == owner[None, :]

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if bounds is None:
            return ops.attention(q, k, v, causal=True)
        cu = bounds.to(q.device)
        spans = ops.Spans.of_documents(cu, cu, length, length, True)
        return ops.attention(q, k, v, spans=spans)

    moved = 2 * q.numel() + 2 * k.numel()
    return Case(
        name,
        op,
        lambda q, k, v: reference.attention(q, k, v, mask.to(q.device)),
        (q, k, v),
        (),
        (moved, 2 * moved),
    )


def attention_cases(small: bool) -> list[Case]:
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
