"""The samples of a batch, by what transformers' and TRL's collators say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.tokens import Tokens

_NO_TARGET = -100


@dataclass(frozen=True, eq=False)
class Collated(Tokens):
    """The samples of a collated batch [B, S], without what pads alone make up.

    places: where the rest is, [n] int64: rows of the batch or, of packed documents, tokens of all
        rows one after the other; None for everywhere.
    completion: [B, S] boolean, the tokens that the penalty is of where it is not of all real ones;
        those of a row stand together.
    """

    places: Tensor | None = None
    completion: Tensor | None = None

    def cut(self, x: Tensor) -> Tensor:
        """The samples in x [B, S, ...]: its rows, or [1, tokens, ...] of packed documents."""
        if self.packed:
            x = x.reshape(1, -1, *x.shape[2:])
        if self.places is None:
            return x
        return x.index_select(1 if self.packed else 0, self.places.to(x.device))


def samples_of(batch: Mapping[str, Any], pad_id: int | None = None) -> Collated:
    """Rows less their pads, or packed documents, of `input_ids` [B, S]; on the host.

    Documents are told by `cu_seq_lens_q`, or by `position_ids` without an `attention_mask`: a row
    begins one, and a token whose position is not above that of the one before it. Their bounds
    count from the first token of the first row through all rows.

    No sample is made of pads alone. Such are rows without a real token, tokens behind the last
    bound, and documents of nothing but the pad token that have no target among their `labels`: TRL
    fills a packed row up to a multiple of a length with documents of one pad each.

    Args:
        batch: as a collator gives it.
        pad_id: the pad token. Without it, it is the token of the last two documents of a batch (or
            of the first two), where each is of this one token.

    Raises:
        ValueError: no `input_ids`; an `attention_mask` of another shape, or one with pads between
            real tokens; bounds that do not fit.
    """
    tokens = batch.get("input_ids")
    if tokens is None:
        raise ValueError(f"input_ids: expected them in the batch, got {sorted(batch)}")
    bounds, mask, positions = (
        batch.get(name) for name in ("cu_seq_lens_q", "attention_mask", "position_ids")
    )
    real = None if mask is None else _real(mask, tokens)
    if bounds is None and real is not None:
        return _rows(real)
    if bounds is not None:
        bounds = _checked(bounds, tokens.numel())
    elif positions is not None:
        given = positions.expand(tokens.shape).cpu()
        begins = F.pad(given[:, 1:] <= given[:, :-1], (1, 0), value=True).flatten()
        bounds = torch.nonzero(F.pad(begins, (0, 1), value=True)).squeeze(1)
    else:
        return Collated(*tokens.shape)
    return _packed(bounds, tokens, batch.get("labels"), real, pad_id)


def completions_of(batch: Mapping[str, Any]) -> Collated:
    """Rows of prompt and completion, [B, P + C], as TRL's trainers that generate have them; on the
    host.

    Args:
        batch: `prompt_mask` [B, P] with pads on the left, `completion_mask` [B, C] with pads on the
            right.

    Raises:
        ValueError: one of them is missing.
    """
    for name in ("prompt_mask", "completion_mask"):
        if not isinstance(batch.get(name), Tensor):
            raise ValueError(f"{name}: expected it in the batch, got {sorted(batch)}")
    prompt, completion = batch["prompt_mask"].cpu() != 0, batch["completion_mask"].cpu() != 0
    real = torch.cat([prompt, completion], 1)
    rows, length = real.shape
    scored = F.pad(completion, (prompt.shape[1], 0))
    return Collated(rows, length, None if real.all() else real, completion=scored)


def _real(mask: Any, tokens: Tensor) -> Tensor:
    """[B, S] bool on the host, from an attention mask.

    Raises:
        ValueError: another shape.
    """
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: expected {list(tokens.shape)}, got {found}")
    return mask.cpu() != 0


def _rows(real: Tensor) -> Collated:
    begins = F.pad(real, (1, 0))[:, :-1] < real
    if (begins.sum(1) > 1).any():
        raise ValueError(
            "attention_mask: expected the real tokens of a row to stand together, got pads between "
            "them"
        )
    kept = real.any(1)
    places = None if kept.all() else kept.nonzero().squeeze(1)
    real = real[kept]
    rows, length = real.shape
    return Collated(rows, length, None if real.all() else real, places=places)


def _checked(bounds: Any, total: int) -> Tensor:
    """int64 on the host.

    Raises:
        ValueError: what is no rising bounds within `total`.
    """
    bounds = torch.as_tensor(bounds).long().cpu()
    fits = bounds.dim() == 1 and len(bounds) > 1 and bounds[0] == 0 and bounds[-1] <= total
    if not fits or (bounds.diff() < 0).any():
        raise ValueError(
            f"cu_seq_lens_q: expected bounds that rise from 0 to at most {total}, got "
            f"{bounds.tolist()}"
        )
    return bounds


def _packed(
    bounds: Tensor, tokens: Tensor, labels: Any, real: Tensor | None, pad_id: int | None
) -> Collated:
    """The documents between `bounds` that hold a real token, and only their real tokens."""
    total, lengths = tokens.numel(), bounds.diff()
    ids = tokens.flatten().cpu()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    counted = torch.ones(len(owner), dtype=torch.bool)
    if real is not None:
        counted &= real.flatten()[: len(owner)]
    full = ids != (_shared(ids, lengths) if pad_id is None else pad_id)
    if labels is not None:
        full |= labels.flatten().cpu() != _NO_TARGET
    content = torch.zeros_like(lengths).index_add_(0, owner, full[: len(owner)].long())
    counted &= content[owner] > 0
    kept = torch.zeros_like(lengths).index_add_(0, owner, counted.long())
    kept = kept[kept > 0]
    places = None if counted.sum() == total else counted.nonzero().squeeze(1)
    bounds = F.pad(kept.cumsum(0), (1, 0))
    return Collated(1, int(bounds[-1]), cu_seqlens=bounds, places=places)


def _shared(ids: Tensor, lengths: Tensor) -> int:
    """The token of the last two documents, or of the first two, where each is of this one token;
    -1, which no token is, elsewhere."""
    ones = lengths[lengths > 0] == 1
    end = int(lengths.sum())
    for documents, pair in ((ones[-2:], ids[end - 2 : end]), (ones[:2], ids[:2])):
        if len(documents) == 2 and documents.all() and pair[0] == pair[1]:
            return int(pair[0])
    return -1
