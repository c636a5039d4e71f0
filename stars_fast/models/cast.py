"""Weights in another dtype, as transformers loads them: tables that are no weights keep theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def cast(model: Any, dtype: torch.dtype, device: str | torch.device | None = None) -> Any:
    """Move a model to a dtype and a device, in place; `nn.Module.to` would round its rotary
    frequencies to 16 bits too, which puts positions beyond a few hundred off.

    Args:
        model: an `nn.Module`. Its buffers that no checkpoint holds keep their dtype.
        device: where it is by default.

    Returns:
        The model.
    """
    held = model.state_dict(keep_vars=True).keys()
    tables = [(name, table) for name, table in model.named_buffers() if name not in held]
    model.to(device=device, dtype=dtype)
    for name, table in tables:
        place, _, leaf = name.rpartition(".")
        module: nn.Module = model.get_submodule(place)
        moved = module._buffers[leaf]
        assert moved is not None
        module._buffers[leaf] = table.to(moved.device)
    return model
