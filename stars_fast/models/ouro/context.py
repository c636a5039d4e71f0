"""The context that all layers of all turns of one call share: positions, masks, cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stars_fast.models.ouro.cache import OuroCache
from stars_fast.models.ouro.config import OuroConfig
from stars_fast.models.ouro.rotary import Rotary
from stars_fast.models.ouro.visible import Visible, visible_keys
from stars_fast.tokens import Tokens, describe_tokens


@dataclass(frozen=True)
class Context:
    """Attributes:
    cos, sin: [B or 1, S, D], of the tokens' positions.
    visible: by layer type, which keys each query sees.
    tokens: of the call.
    cache: keys and values of earlier tokens.
    rows: [n] int64, where a turn runs for some rows of the batch alone.
    """

    cos: Tensor
    sin: Tensor
    visible: dict[str, Visible]
    tokens: Tokens
    cache: OuroCache | None = None
    rows: Tensor | None = None
    _elsewhere: dict[torch.device, Context] = field(default_factory=dict, init=False, repr=False)

    @property
    def real(self) -> Tensor | None:
        """[B, S] boolean, True on real tokens; None where all are."""
        return self.tokens.new_real

    @property
    def starts(self) -> Tensor | None:
        """[B or 1, S] int64, where each token's packed document starts; None if not packed."""
        return self.tokens.starts

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
                tokens=self.tokens.to(device),
                rows=None if self.rows is None else self.rows.to(device),
            )
        return self._elsewhere[device]

    def take_rows(self, rows: Tensor) -> Context:
        """For some rows of the batch alone (indices into the whole batch)."""
        return replace(
            self,
            cos=self.cos if len(self.cos) == 1 else self.cos[rows],
            sin=self.sin if len(self.sin) == 1 else self.sin[rows],
            visible={kind: visible.take_rows(rows) for kind, visible in self.visible.items()},
            tokens=self.tokens.take_rows(rows),
            rows=rows,
        )


def make_context(
    windows: Mapping[str, int | None],
    rotary: Rotary,
    h: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cache: OuroCache | None = None,
    tokens: Tokens | None = None,
) -> Context:
    """Check the arguments of a call and work out what its layers share.

    Args:
        windows: by kind of layer, how many tokens a query sees at most; None for no bound.
        h: [B, S, D]; shape, dtype and device count.
        attention_mask: [B, past + S], 1 on real tokens. Without it all tokens are real.
        position_ids: [B or 1, S] integers. By default they count the real tokens. Where they fall
            or stay within a row, a packed document begins; not with a mask.
        cu_seqlens: [n + 1] integers, bounds of documents packed in a batch of one row.
        cache: its tokens come before these.
        tokens: these, instead of what the arguments before say, and not checked again; without a
            cache.

    Raises:
        TypeError, ValueError: an argument of the wrong type or shape, named.
    """
    past = 0 if cache is None else cache.get_seq_length()
    if tokens is None:
        tokens = describe_tokens(h, attention_mask, position_ids, cu_seqlens, past, look=True)
    else:
        tokens = tokens.to(h.device)
    if past and tokens.packed:
        raise ValueError("cu_seqlens: expected None with a cache that holds tokens, got a tensor")
    if past and tokens.restarts is not None:
        raise ValueError(
            "position_ids: expected positions that rise along a row with a cache, "
            "got packed documents"
        )
    visible = {kind: visible_keys(tokens, window) for kind, window in windows.items()}
    return Context(*rotary(tokens.positions, h.dtype), visible, tokens, cache=cache)


def windows_of(config: OuroConfig) -> dict[str, int | None]:
    """The kinds of layers that an Ouro has, with the window of each."""
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    return {kind: windows[kind] for kind in sorted(set(config.layer_types))}
