"""What all layers of all turns of one call share: positions, masks, cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
from stars_fast.models.token_layout import check_tokens


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
            or stay within a row, a packed document begins; not with a mask.
        cu_seqlens: [n + 1] integers, bounds of documents packed in a batch of one row.
        cache: its tokens come before these.

    Raises:
        TypeError, ValueError: an argument of the wrong type or shape, named.
    """
    length = h.shape[1]
    past = 0 if cache is None else cache.get_seq_length()
    check_tokens(h, attention_mask, position_ids, cu_seqlens, past)
    if cu_seqlens is not None:
        if past:
            raise ValueError("cu_seqlens: expected None with a cache that holds tokens")
        documents, starts = _documents(cu_seqlens, h)
        positions = torch.arange(length, device=h.device) - starts
        visible = {
            kind: packed_visible(starts, window, documents) for kind, window in _windows(config)
        }
        return Context(*rotary(positions, h.dtype), visible, starts=starts, cache=cache)
    padding, holes = _padding(attention_mask, h.device)
    if position_ids is not None:
        positions = position_ids.view(-1, length).to(h.device)
        begins = _restarts(positions) if attention_mask is None else None
        if begins is not None:
            if past:
                raise ValueError(
                    "position_ids: expected positions that rise along a row with a cache, "
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


def _documents(cu_seqlens: Tensor, h: Tensor) -> tuple[Documents, Tensor]:
    """Bounds, and [1, S]: where the document of each token starts. The host looks at the bounds:
    on the CPU, in pinned memory, they keep a GPU from waiting."""
    bounds = cu_seqlens.tolist()
    cu = cu_seqlens.to(h.device, torch.int32, non_blocking=True)
    starts = torch.repeat_interleave(cu[:-1].long(), cu.diff(), output_size=h.shape[1])
    return Documents(cu, bounds), starts.unsqueeze(0)


def _padding(mask: Tensor | None, device: torch.device) -> tuple[Tensor | None, bool]:
    """The mask as booleans, None where all tokens are real, and whether it has holes. The host
    looks at it: a mask on the CPU keeps a GPU from waiting."""
    if mask is None:
        return None, False
    real = mask != 0
    changes = (real[:, 1:] != real[:, :-1]).sum(1) + real[:, 0].long() + real[:, -1].long()
    whole, holes = torch.stack((real.all(), (changes > 2).any())).tolist()
    return (None, False) if whole else (real.to(device), holes)


def _restarts(positions: Tensor) -> Tensor | None:
    """[B or 1, S]: where the document of each token starts; None where no row holds several."""
    new = positions[:, 1:] <= positions[:, :-1]
    if not new.any():
        return None
    place = torch.arange(positions.shape[1], device=positions.device)
    first = F.pad(new, (1, 0), value=True)
    return torch.where(first, place, 0).cummax(1).values
