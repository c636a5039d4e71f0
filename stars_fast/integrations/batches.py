"""The samples of a batch, by what transformers' and TRL's collators say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.training.samples import Samples

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What transformers' collators add for attention kernels that take packed documents."""


def samples_of(batch: Mapping[str, Any]) -> Samples:
    """Rows less their pads, or packed documents, of `input_ids` [B, S]; on the host.

    Documents are told by `cu_seq_lens_q` (B = 1), or by `position_ids` without an `attention_mask`:
    a row begins one, and a token whose position is not above that of the one before it. Their
    bounds count from the first token of the first row through all rows.

    Raises:
        ValueError: no `input_ids`, or an `attention_mask` of another shape.
    """
    tokens = batch.get("input_ids")
    if tokens is None:
        raise ValueError(f"input_ids: expected them in the batch, got {sorted(batch)}")
    bounds, mask, positions = (
        batch.get(name) for name in ("cu_seq_lens_q", "attention_mask", "position_ids")
    )
    if bounds is not None:
        return _packed(bounds.long().cpu())
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
            found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask: expected {list(tokens.shape)}, got {found}")
        real = mask.cpu() != 0
        return Samples(len(tokens), None if real.all() else real)
    if positions is not None:
        given = positions.expand(tokens.shape).cpu()
        begins = F.pad(given[:, 1:] <= given[:, :-1], (1, 0), value=True).flatten()
        return _packed(torch.nonzero(F.pad(begins, (0, 1), value=True)).squeeze(1))
    return Samples(len(tokens))


def _packed(bounds: Tensor) -> Samples:
    bounds = bounds.unique_consecutive()  # no empty documents
    return Samples(len(bounds) - 1, None, bounds)
