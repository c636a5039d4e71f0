"""Attention as matrix products on blocks of queries: any device and dtype, O(S) memory.

A block of queries meets all its keys at once, so its softmax is complete and nothing is rescaled;
the backward computes the weights of the block again. Keys that no query of the block sees are
skipped. Formulas: `attention.py`. 6 products a block forward, 15 backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.library import implementation, plain
from stars_fast.ops.precision import no_autocast, widen
from stars_fast.ops.softmax import backward_in_place
from stars_fast.ops.spans import causal_spans, full_spans, is_unasked

# Queries of a block, and elements of one [rows, keys] tile: a few tiles fit a core's cache.
_QUERIES = 128
_TILE = 2**19

_DENSE = torch.contiguous_format


_Block = tuple[int, int, int]
"""First query of a block; first key that one of its queries sees, and the one after the last."""


@plain("attention_weights")
def _weights(s: Tensor, s_dot: Tensor, spans: Tensor) -> None:
    key = torch.arange(s.shape[-1], device=s.device)
    seen = (key >= spans[..., :1]) & (key < spans[..., 1:])  # [B or 1, Sq, Sk]
    hidden = seen.logical_not_().unsqueeze(1)
    s.masked_fill_(hidden, -torch.inf)
    top = s.amax(-1, keepdim=True)
    s.sub_(torch.where(top == -torch.inf, 0.0, top)).exp_()
    s.div_(s.sum(-1, keepdim=True).clamp_min_(torch.finfo(s.dtype).tiny))
    s_dot.masked_fill_(hidden, 0.0)
    s_dot.sub_((s * s_dot).sum(-1, keepdim=True)).mul_(s)


@plain("attention_weights_backward")
def _weights_backward(dp: Tensor, dp_dot: Tensor, p: Tensor, p_dot: Tensor, spans: Tensor) -> None:
    """Outside the spans p and p_dot are 0, and so is what comes out."""
    backward_in_place(dp, dp_dot, p, p_dot)


@dataclass
class _Tile:
    """Heads [n0, n1) (of B * Hkv), queries [i0, i1), keys [j0, j1)."""

    heads: slice
    queries: slice
    keys: slice
    spans: Tensor
    mask: Tensor | None


class _Tiling:
    """The tiles of one call, and scratch memory for them. `blocks` are those of the forward pass,
    if they are known; `seen_at_once` says that one of them has all queries and all keys, so that
    each row of a result comes from one tile."""

    def __init__(
        self,
        q_shape: torch.Size,
        k_shape: torch.Size,
        spans: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        device: torch.device,
        blocks: list[_Block] | None = None,
    ) -> None:
        _, self.batch, heads, self.length, _ = q_shape
        _, _, self.kv_heads, self.keys, _ = k_shape
        self.groups = heads // self.kv_heads
        starts = range(0, self.length, _QUERIES)
        if spans is None:
            make = causal_spans if causal else full_spans
            self.spans = make(self.length, self.keys, device)
            stops = [min(i + _QUERIES, self.keys) if causal else self.keys for i in starts]
            self.blocks = [(i, 0, stop) for i, stop in zip(starts, stops, strict=True)]
        else:
            self.spans = spans if len(spans) == 1 else spans.repeat_interleave(self.kv_heads, 0)
            self.blocks = _blocks(spans, starts, self.keys) if blocks is None else blocks
        self.seen_at_once = self.keys > 0 and self.blocks == [(0, 0, self.keys)]
        self.mask = None if mask is None else self._expand(mask)
        self.buffers: dict[int, Tensor] = {}

    def _expand(self, mask: Tensor) -> Tensor:
        """A mask [B or 1, H or 1, Sq or 1, Sk or 1] as [B * Hkv, G, Sq, Sk], a view if possible."""
        shape = (self.batch, self.kv_heads, self.groups, self.length, self.keys)
        mask = mask.expand(self.batch, mask.shape[1], self.length, self.keys)
        if mask.shape[1] == 1:
            return mask.unsqueeze(1).expand(shape).flatten(0, 1)
        return mask.reshape(shape).flatten(0, 1)

    def tiles(self) -> Iterator[_Tile]:
        """All tiles in which a query sees a key."""
        heads = self.batch * self.kv_heads
        for i, j0, j1 in self.blocks:
            if j0 >= j1:
                continue  # zeros stay zeros
            queries = slice(i, min(i + _QUERIES, self.length))
            keys = slice(j0, j1)
            rows = self.groups * (queries.stop - i)
            step = max(1, _TILE // (rows * (j1 - j0)))
            for n in range(0, heads, step):
                chunk = slice(n, min(n + step, heads))
                spans = self.spans if len(self.spans) == 1 else self.spans[chunk]
                spans = spans[:, queries]
                yield _Tile(
                    chunk,
                    queries,
                    keys,
                    (spans - j0).clamp_min_(0) if j0 else spans,
                    None if self.mask is None else self.mask[chunk, :, queries, keys],
                )

    def scratch(self, place: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of a tile, the same for each tile that asks for this place."""
        size = torch.Size(shape).numel()
        held = self.buffers.get(place)
        if held is None or held.numel() < size:
            held = self.buffers[place] = like.new_empty(size)
        return held[:size].view(shape)

    def rows(self, x: Tensor, tile: _Tile) -> Tensor:
        """The tile's part of x [B * Hkv, G, Sq, D], as [n, G * rows, D]."""
        return x[tile.heads, :, tile.queries].flatten(1, 2)

    def weights(self, q: Tensor, k: Tensor, tile: _Tile) -> tuple[Tensor, Tensor]:
        """p and p_dot of a tile, [n, G * rows, keys]."""
        q0, q1 = self.rows(q[0], tile), self.rows(q[1], tile)
        k0, k1 = k[0, tile.heads, tile.keys], k[1, tile.heads, tile.keys]
        shape = (*q0.shape[:2], k0.shape[1])
        s = torch.bmm(q0, k0.mT, out=self.scratch(0, shape, q0))
        s_dot = torch.bmm(q1, k0.mT, out=self.scratch(1, shape, q0))
        s_dot.baddbmm_(q0, k1.mT)
        if tile.mask is not None:
            full = s.view(tile.mask.shape)
            if tile.mask.dtype == torch.bool:
                full.masked_fill_(tile.mask.logical_not(), -torch.inf)
            else:
                full.add_(tile.mask)
        weigh = implementation("attention_weights", s)
        weigh(self.full(s, tile), self.full(s_dot, tile), tile.spans)
        return s, s_dot

    def full(self, s: Tensor, tile: _Tile) -> Tensor:
        """A tile [n, G * rows, keys] as [B or 1, heads, rows, keys], as `tile.spans` have it."""
        rows = tile.queries.stop - tile.queries.start
        return s.view(len(tile.spans), -1, rows, s.shape[-1])


def _blocks(spans: Tensor, starts: Iterable[int], keys: int) -> list[_Block]:
    """The blocks of queries that begin at `starts`."""
    if is_unasked():
        return [(i, 0, keys) for i in starts]
    start, stop = spans.unbind(-1)
    seen = start < stop
    first = torch.where(seen, start, keys).amin(0).tolist()
    last = torch.where(seen, stop, 0).amax(0).tolist()
    return [(i, min(first[i : i + _QUERIES]), max(last[i : i + _QUERIES])) for i in starts]


class BlockedAttention(torch.autograd.Function):
    """Arguments and result as `attention.attention`, with spans [B or 1, Sq, 2] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        tiling = _Tiling(q.shape, k.shape, spans, mask, causal, q.device)
        qs, ks, vs = _split(q, k, v, scale)
        # Not q, k, v: those may be views of a projection that would live on for them alone.
        ctx.save_for_backward(qs, ks, vs, spans, mask)
        ctx.options = q.shape, k.shape, v.shape, q.dtype, causal, scale
        ctx.blocks = tiling.blocks
        make = vs.new_empty if tiling.seen_at_once else vs.new_zeros
        out = make((*qs.shape[:-1], vs.shape[-1]))
        with no_autocast(q):
            for tile in tiling.tiles():
                p, p_dot = tiling.weights(qs, ks, tile)
                v0, v1 = vs[0, tile.heads, tile.keys], vs[1, tile.heads, tile.keys]
                rows = out[:, tile.heads, :, tile.queries]
                rows[0] = torch.bmm(p, v0).view(rows.shape[1:])
                # Not in place: selective checkpointing may hold what a product returned.
                moved = torch.baddbmm(torch.bmm(p_dot, v0), p, v1)
                rows[1] = moved.view(rows.shape[1:])
        return _joined(out, q.shape, q.dtype).detach()  # no view: it may be written to

    @staticmethod
    @first_derivative("attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qs, ks, vs, spans, mask = ctx.saved_tensors
        q_shape, k_shape, v_shape, dtype, causal, scale = ctx.options
        tiling = _Tiling(q_shape, k_shape, spans, mask, causal, qs.device, ctx.blocks)
        g = _grouped(widen(grad), k_shape[2]).contiguous()
        make = torch.empty_like if tiling.seen_at_once else torch.zeros_like
        dq, dk, dv = make(qs), make(ks), make(vs)
        nothing, beta = qs.new_zeros(()), 0 if tiling.seen_at_once else 1
        backward = implementation("attention_weights_backward", qs)
        with no_autocast(qs):
            for tile in tiling.tiles():
                p, p_dot = tiling.weights(qs, ks, tile)
                q0, q1 = tiling.rows(qs[0], tile), tiling.rows(qs[1], tile)
                a, b = tiling.rows(g[0], tile), tiling.rows(g[1], tile)
                k0, k1 = ks[0, tile.heads, tile.keys], ks[1, tile.heads, tile.keys]
                v0, v1 = vs[0, tile.heads, tile.keys], vs[1, tile.heads, tile.keys]
                dv0, dv1 = dv[0, tile.heads, tile.keys], dv[1, tile.heads, tile.keys]
                dv0.baddbmm_(p_dot.mT, b, beta=beta).baddbmm_(p.mT, a)
                dv1.baddbmm_(p.mT, b, beta=beta)
                dp = torch.bmm(a, v0.mT, out=tiling.scratch(2, p.shape, p))
                dp.baddbmm_(b, v1.mT)
                dp_dot = torch.bmm(b, v0.mT, out=tiling.scratch(3, p.shape, p))
                backward(*(tiling.full(x, tile) for x in (dp, dp_dot, p, p_dot)), tile.spans)
                rows = dq[:, tile.heads, :, tile.queries]
                moved = torch.baddbmm(nothing, dp, k0, beta=0, alpha=scale)
                rows[0] = moved.baddbmm_(dp_dot, k1, alpha=scale).view(rows.shape[1:])
                moved = torch.baddbmm(nothing, dp_dot, k0, beta=0, alpha=scale)
                rows[1] = moved.view(rows.shape[1:])
                dk0, dk1 = dk[0, tile.heads, tile.keys], dk[1, tile.heads, tile.keys]
                dk0.baddbmm_(dp.mT, q0, beta=beta).baddbmm_(dp_dot.mT, q1)
                dk1.baddbmm_(dp_dot.mT, q0, beta=beta)
        shapes = zip((dq, dk, dv), (q_shape, k_shape, v_shape), strict=True)
        return *(x.view(shape).to(dtype) for x, shape in shapes), None, None, None, None


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[2, B, H, S, D] -> [2, B * Hkv, G, S, D]: queries of a group share their keys."""
    two, batch, heads, length, width = x.shape
    return x.reshape(two, batch * kv_heads, heads // kv_heads, length, width)


def _split(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled queries [2, B * Hkv, G, Sq, D], keys and values [2, B * Hkv, Sk, D], contiguous, in
    memory of their own: the inputs may be written to before the backward."""
    wide = widen(q)
    queries = torch.mul(wide, scale, out=torch.empty_like(wide, memory_format=_DENSE))
    return _grouped(queries, k.shape[2]), _flat_heads(k), _flat_heads(v)


def _flat_heads(x: Tensor) -> Tensor:
    flat = widen(x).flatten(1, 2).contiguous()
    return flat.clone() if flat.data_ptr() == x.data_ptr() else flat


def _joined(x: Tensor, q_shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """[2, B * Hkv, G, Sq, D] -> [2, B, H, Sq, D] in `dtype` and memory order [.., Sq, H, D]."""
    full = x.view(*q_shape[:-1], x.shape[-1])
    return full.transpose(2, 3).to(dtype).contiguous().transpose(2, 3)
