"""What all layers of all turns of one call share: positions, masks, cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.models.ouro.cache import OuroCache
from stars_fast.models.ouro.config import OuroConfig
from stars_fast.models.ouro.rotary import Rotary
from stars_fast.models.ouro.visible import (
    Documents,
    Visible,
    causal_visible,
    packed_visible,
    padded_visible,
)


@dataclass(frozen=True)
class Context:
    """Attributes:
    cos, sin: [B or 1, S, D], of the tokens' positions.
    visible: by layer type, which keys each query sees.
    real: [B, S] boolean, True on real tokens; None where all are.
    starts: [B or 1, S] int64, where the packed document of each token starts; None if not packed.
    cache: keys and values of earlier tokens.
    rows: [n] int64, where a turn runs for some rows of the batch alone.
    """

    cos: Tensor
    sin: Tensor
    visible: dict[str, Visible]
    real: Tensor | None = None
    starts: Tensor | None = None
    cache: OuroCache | None = None
    rows: Tensor | None = None
    _elsewhere: dict[torch.device, Context] = field(default_factory=dict, init=False, repr=False)

    def on(self, device: torch.device) -> Context:
        """The same on another device, for layers that a device map has put there; copied once."""
        if self.cos.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(
                self,
                cos=self.cos.to(device),
                sin=self.sin.to(device),
                visible={kind: visible.on(device) for kind, visible in self.visible.items()},
                rows=None if self.rows is None else self.rows.to(device),
            )
        return self._elsewhere[device]

    def take(self, rows: Tensor) -> Context:
        """For some rows of the batch alone (indices into the whole batch)."""
        return replace(
            self,
            cos=self.cos if len(self.cos) == 1 else self.cos[rows],
            sin=self.sin if len(self.sin) == 1 else self.sin[rows],
            visible={kind: visible.take(rows) for kind, visible in self.visible.items()},
            real=None if self.real is None else self.real[rows],
            rows=rows,
        )


def make_context(
    config: OuroConfig,
    rotary: Rotary,
    h: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cache: OuroCache | None = None,
) -> Context:
    """Check the arguments of a call and work out what its layers share.

    Args:
        h: [B, S, D]; shape, dtype and device count.
        attention_mask: [B, past + S], 1 on real tokens. Without it all tokens are real.
        position_ids: [B or 1, S] integers. By default they count the real tokens. Where they fall
            or stay within a row, a packed document begins.
        cu_seqlens: [n + 1] integers, bounds of documents packed in a batch of one row.
        cache: its tokens come before these.

    Raises:
        TypeError, ValueError: an argument of the wrong type or shape, named.
    """
    batch, length = h.shape[:2]
    past = 0 if cache is None else cache.get_seq_length()
    if cu_seqlens is not None:
        for name, other in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            if other is not None:
                raise ValueError(f"{name}: expected None when cu_seqlens is given, got a tensor")
        if past:
            raise ValueError("cu_seqlens: expected None with a cache that holds tokens")
        documents, starts = _documents(cu_seqlens, h)
        positions = torch.arange(length, device=h.device) - starts
        visible = {
            kind: packed_visible(starts, window, documents) for kind, window in _windows(config)
        }
        return Context(*rotary(positions, h.dtype), visible, starts=starts, cache=cache)
    padding, holes = _padding(attention_mask, batch, past + length, h.device)
    if position_ids is not None:
        positions = _positions(position_ids, batch, length, h.device)
        begins = _restarts(positions, None if padding is None else padding[:, past:])
        if begins is not None:
            if padding is not None or past:
                raise ValueError(
                    "position_ids: expected positions that rise along a row with pads or a cache, "
                    "got packed documents"
                )
            packed = {k: packed_visible(begins, window) for k, window in _windows(config)}
            return Context(*rotary(positions, h.dtype), packed, starts=begins, cache=cache)
    elif padding is None:
        positions = torch.arange(past, past + length, device=h.device).unsqueeze(0)
    else:
        positions = (padding.cumsum(1) - 1).clamp_min(0)[:, past:]
    if padding is None:
        visible = {k: causal_visible(length, past, w, h.device) for k, w in _windows(config)}
    else:
        visible = {k: padded_visible(padding, holes, past, w) for k, w in _windows(config)}
    real = None if padding is None else padding[:, past:]
    return Context(*rotary(positions, h.dtype), visible, real, cache=cache)


def _windows(config: OuroConfig) -> list[tuple[str, int | None]]:
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    return [(kind, windows[kind]) for kind in sorted(set(config.layer_types))]


def _documents(cu_seqlens: Any, h: Tensor) -> tuple[Documents, Tensor]:
    """Bounds, and [1, S]: where the document of each token starts."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.is_floating_point():
        raise TypeError("cu_seqlens: expected a tensor of integers")
    if h.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected a batch of one packed row, got {h.shape[0]} rows")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: expected shape [n + 1], got {list(cu_seqlens.shape)}")
    bounds = cu_seqlens.tolist()
    total = h.shape[1]
    if bounds[0] or bounds[-1] != total or not all(a <= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens: expected bounds that rise from 0 to the {total} tokens, got {bounds}"
        )
    cu = cu_seqlens.to(h.device, torch.int32)
    lengths = torch.tensor([b - a for a, b in pairwise(bounds)])
    starts = torch.repeat_interleave(torch.tensor(bounds[:-1]), lengths)
    return Documents(cu, bounds), starts.to(h.device).unsqueeze(0)


def _padding(
    mask: Any, batch: int, length: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """The mask as booleans, None where all tokens are real, and whether it has holes. The host
    looks at it: a mask on the CPU keeps a GPU from waiting."""
    if mask is None:
        return None, False
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor, got {type(mask).__name__}")
    if mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask: expected shape [B, past + S] = {[batch, length]}, "
            f"got {list(mask.shape)}"
        )
    real = mask != 0
    changes = (real[:, 1:] != real[:, :-1]).sum(1) + real[:, 0].long() + real[:, -1].long()
    whole, holes = torch.stack((real.all(), (changes > 2).any())).tolist()
    return (None, False) if whole else (real.to(device), holes)


def _positions(positions: Any, batch: int, length: int, device: torch.device) -> Tensor:
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        raise TypeError("position_ids: expected a tensor of integers")
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    if positions.shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids: expected shape [B or 1, S] = {[batch, length]}, "
            f"got {list(positions.shape)}"
        )
    return positions.to(device)


def _restarts(positions: Tensor, real: Tensor | None) -> Tensor | None:
    """[B or 1, S]: where the document of each token starts; None where no row holds several."""
    new = positions[:, 1:] <= positions[:, :-1]
    if real is not None:
        new = new & real[:, 1:] & real[:, :-1]
    if not new.any():
        return None
    place = torch.arange(positions.shape[1], device=positions.device)
    first = F.pad(new, (1, 0), value=True)
    return torch.where(first, place, 0).cummax(1).values
