"""Where the tokens of a batch are: pads, packed documents and positions, and who sees whom.

Shapes: B batch, S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


@dataclass(frozen=True)
class TokenLayout:
    """The layout of one state [B, S, D], on its device.

    Attributes:
        positions: int64 [B or 1, S]. By default a token's index, less the pads before it and, in a
            packed row, from the start of its document.
        real: boolean [B, S], False on pads; None where all are real.
        owner: int64 [B or 1, S], the document of each token; None where a row is one document.
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
        """The layout of the tokens of `h`; arguments and errors as `check_tokens`.

        A token whose position is not above that of the one before it starts a document.
        """
        check_tokens(h, attention_mask, position_ids, cu_seqlens)
        length = h.shape[1]
        real = None if attention_mask is None else (attention_mask != 0).to(h.device)
        positions = torch.arange(length, device=h.device).unsqueeze(0)
        owner = None
        if cu_seqlens is not None:
            bounds = cu_seqlens.long().to(h.device)
            owner = torch.searchsorted(bounds[1:].contiguous(), positions, right=True)
            positions = positions - bounds[owner]
        elif position_ids is not None:
            given = position_ids.view(-1, length).long()
            positions = given.to(h.device)
            if real is None:
                starts = F.pad(given[:, 1:] <= given[:, :-1], (1, 0))
                if not _host_knows(starts) or starts.any():
                    owner = starts.cumsum(1).to(h.device)
        elif real is not None:
            positions = (real.cumsum(1) - 1).clamp_min(0)
        return cls(positions, real, owner)

    def visible(self, window: int | None = None) -> Tensor:
        """Boolean [B or 1, 1, S, S], True where a query (row) sees a key: itself and the earlier
        tokens of its document, within a window of `window` places (its own and those of pads count,
        as in transformers). A pad sees itself alone, so that no row is empty, and is seen by no
        other token."""
        place = torch.arange(self.positions.shape[1], device=self.positions.device)
        distance = place[:, None] - place
        sees = (distance >= 0).unsqueeze(0)
        if window is not None:
            sees = sees & (distance < window)
        if self.owner is not None:
            sees = sees & (self.owner.unsqueeze(2) == self.owner.unsqueeze(1))
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
        takes = f"{what} takes no attention mask, so"
        if self.owner is not None:
            _require(
                (self.owner == self.owner[:, :1]).all(),
                f"position_ids: {takes} expected positions that rise along a row",
                "packed documents",
            )
        if self.real is not None:
            _require(
                (self.real[:, 1:] <= self.real[:, :-1]).all(),
                f"attention_mask: {takes} expected pads right of the real tokens, where causality "
                "hides them",
                "pads before or between them",
            )


def check_tokens(
    h: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    past: int = 0,
) -> None:
    """Raise unless the arguments fit each other.

    Args:
        h: [B, S, D]; only its shape and device matter.
        attention_mask: [B, past + S], boolean or 0/1, 1 for real tokens.
        position_ids: [S], [1, S] or [B, S] integers. With a mask they rise from each real token to
            the next to it.
        cu_seqlens: [n + 1] integers, 0 = c_0 <= ... <= c_n = S: documents packed in one row
            (B = 1). It goes with neither of the others.
        past: tokens that a cache holds of each row.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or values, named. Values that
            are on another device than the CPU are looked at there, and fail there.
    """
    if h.dim() != 3:
        raise ValueError(f"h: expected shape [B, S, D], got {list(h.shape)}")
    batch, length = h.shape[:2]
    given = {"attention_mask": attention_mask, "position_ids": position_ids}
    for name, value in {**given, "cu_seqlens": cu_seqlens}.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if cu_seqlens is not None:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: expected None when cu_seqlens is given, got a tensor")
        _check_bounds(cu_seqlens, batch, length)
    if attention_mask is not None:
        _check_mask(attention_mask, batch, past + length)
    if position_ids is not None:
        _check_positions(position_ids, batch, length)
        if attention_mask is not None:
            _check_rise(position_ids.view(-1, length), attention_mask[:, past:])


_HINT = "(where only a part of the rows is run, hand it over with the call)"


def _check_mask(mask: Tensor, batch: int, length: int) -> None:
    if mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask: expected shape [B, S] = {[batch, length]}, got {list(mask.shape)} "
            f"{_HINT}"
        )
    if mask.is_floating_point() and mask.device.type != "cpu":
        # Likely one to add to logits, 0 where a key is seen; the host doesn't wait to find out.
        raise TypeError(
            f"attention_mask: expected booleans or integers on {mask.device.type}, got {mask.dtype}"
        )
    if mask.dtype != torch.bool:
        _require(
            ((mask == 0) | (mask == 1)).all(),
            "attention_mask: expected 1 on real tokens and 0 on pads",
            "other values",
        )


def _check_positions(positions: Tensor, batch: int, length: int) -> None:
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"position_ids: expected integers, got {positions.dtype}")
    if positions.shape not in ((length,), (1, length), (batch, length)):
        raise ValueError(
            f"position_ids: expected shape [S], [1, S] or [B, S] with [B, S] = "
            f"{[batch, length]}, got {list(positions.shape)} {_HINT}"
        )


def _check_rise(positions: Tensor, mask: Tensor) -> None:
    device = mask.device if positions.is_cpu else positions.device
    positions, real = positions.to(device), mask.to(device) != 0
    pads = ~(real[:, 1:] & real[:, :-1])
    _require(
        (pads | (positions[:, 1:] > positions[:, :-1])).all(),
        "position_ids: expected positions that rise along a row when attention_mask is given",
        "packed documents",
    )


def _check_bounds(cu_seqlens: Tensor, batch: int, length: int) -> None:
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens: expected integers, got {cu_seqlens.dtype}")
    if batch != 1:
        raise ValueError(f"h: expected shape [1, total, D] with cu_seqlens, got {batch} rows")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: expected shape [n + 1], got {list(cu_seqlens.shape)}")
    _require(
        (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all(),
        f"cu_seqlens: expected bounds that rise from 0 to total = {length}",
        cu_seqlens,
    )


def _require(fits: Tensor, message: str, got: Tensor | str) -> None:
    """Raise ValueError unless `fits`; on a device, the device raises."""
    if not _host_knows(fits):
        torch._assert_async(fits, message)
    elif not fits:
        raise ValueError(f"{message}, got {got if isinstance(got, str) else got.tolist()}")


def _host_knows(tensor: Tensor) -> bool:
    """Whether the host can look at the values, with no device to wait for and no trace to break."""
    traced = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    return tensor.is_cpu and type(tensor) is Tensor and not traced
