"""Where the tokens of a batch are: pads, packed documents and positions, and who sees whom.

Shapes: B batch, S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    """The layout of one state [B, S, D], on its device.

    Attributes:
        positions: int64 [B or 1, S]. By default a token's index, less the pads before it and, in a
            packed row, from the start of its document.
        real: boolean [B, S], False on pads; None where all are real.
        owner: int64 [S], the document of each token of a packed row; None for a plain batch.
    """

    positions: Tensor
    real: Tensor | None
    owner: Tensor | None

    @classmethod
    def of(
        cls,
        h: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> TokenLayout:
        """The layout of the tokens of `h`.

        Args:
            h: [B, S, D]; only its shape and device matter.
            attention_mask: [B, S], boolean or 0/1, 1 for real tokens.
            position_ids: [S], [1, S] or [B, S] integers, instead of the default positions.
            cu_seqlens: [n + 1] integers, 0 = c_0 <= ... <= c_n = S: documents packed in one row
                (B = 1).

        Raises:
            TypeError, ValueError: an argument of the wrong type or shape, named.
        """
        if h.dim() != 3:
            raise ValueError(f"h: expected shape [B, S, D], got {list(h.shape)}")
        batch, length = h.shape[:2]
        for name, given in (
            ("attention_mask", attention_mask),
            ("position_ids", position_ids),
            ("cu_seqlens", cu_seqlens),
        ):
            if given is not None and not isinstance(given, Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(given).__name__}")
        real = None if attention_mask is None else _real(attention_mask, batch, length, h.device)
        positions = torch.arange(length, device=h.device).unsqueeze(0)
        owner = None
        if cu_seqlens is not None:
            if real is not None:
                raise ValueError(
                    "attention_mask: expected None when cu_seqlens is given, got a tensor"
                )
            bounds = _bounds(cu_seqlens, batch, length).to(h.device)
            owner = torch.searchsorted(bounds[1:].contiguous(), positions[0], right=True)
            positions = positions - bounds[owner]
        elif real is not None:
            positions = (real.cumsum(1) - 1).clamp_min(0)
        if position_ids is not None:
            positions = _positions(position_ids, batch, length).to(h.device)
        return cls(positions, real, owner)

    def visible(self, window: int | None = None) -> Tensor:
        """Boolean [B or 1, 1, S, S], True where a query (row) sees a key: itself and the earlier
        tokens of its document, within a window of `window` places (its own and those of pads count,
        as in transformers). A pad sees itself alone, so that no row is empty, and is seen by no
        other token."""
        place = torch.arange(self.positions.shape[1], device=self.positions.device)
        distance = place[:, None] - place
        sees = distance >= 0
        if window is not None:
            sees = sees & (distance < window)
        if self.owner is not None:
            sees = sees & (self.owner[:, None] == self.owner)
        sees = sees.unsqueeze(0)
        if self.real is not None:
            both = self.real.unsqueeze(2) & self.real.unsqueeze(1)
            sees = (sees & both) | (distance == 0)
        return sees.unsqueeze(1)

    def is_causal(self, window: int | None = None) -> bool:
        """Whether every query sees all that came before it."""
        reaches = window is None or window >= self.positions.shape[1]
        return reaches and self.real is None and self.owner is None

    def check_pads_last(self, what: str) -> None:
        """Raise unless all pads stand right of the real tokens, where causality hides them.

        Raises:
            ValueError: `what` can't be given a mask, and there are pads elsewhere or documents.
        """
        if self.owner is not None:
            raise ValueError(
                f"cu_seqlens: {what} takes no attention mask, so that packed documents would see "
                "each other; pass them as rows, padded on the right"
            )
        if self.real is None:
            return
        ordered = (self.real[:, 1:] <= self.real[:, :-1]).all()
        expected = (
            f"attention_mask: {what} takes no attention mask, so pads must stand right of the "
            "real tokens, where causality hides them"
        )
        if ordered.device.type != "cpu":
            torch._assert_async(ordered, expected)  # asking the device would make the host wait
        elif not ordered:
            raise ValueError(f"{expected}; got pads before or between them")


def _real(mask: Tensor, batch: int, length: int, device: Any) -> Tensor:
    if mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask: expected shape [B, S] = {[batch, length]}, got {list(mask.shape)} "
            "(where only a part of the rows is run, hand it over with the call)"
        )
    return (mask != 0).to(device)


def _positions(positions: Tensor, batch: int, length: int) -> Tensor:
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"position_ids: expected integers, got {positions.dtype}")
    if positions.shape not in ((length,), (1, length), (batch, length)):
        raise ValueError(
            f"position_ids: expected shape [S], [1, S] or [B, S] with [B, S] = "
            f"{[batch, length]}, got {list(positions.shape)}"
        )
    return positions.view(-1, length).long()


def _bounds(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens: expected integers, got {cu_seqlens.dtype}")
    if batch != 1:
        raise ValueError(f"h: expected shape [1, total, D] with cu_seqlens, got {batch} rows")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: expected shape [n + 1], got {list(cu_seqlens.shape)}")
    fits = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all()
    expected = f"cu_seqlens: expected bounds that rise from 0 to total = {length}"
    if cu_seqlens.device.type != "cpu":
        torch._assert_async(fits, expected)
    elif not fits:
        raise ValueError(f"{expected}, got {cu_seqlens.tolist()}")
    return cu_seqlens.long()
