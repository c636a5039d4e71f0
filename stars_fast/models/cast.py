"""Weights in another dtype, as transformers loads them: tables that are no weights keep theirs, and
what a model wants in fp32, such as a router's, is in fp32."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn


def cast(model: Any, dtype: torch.dtype, device: str | torch.device | None = None) -> Any:
    """Move a model to a dtype and a device, in place; `nn.Module.to` would round its rotary
    frequencies to 16 bits too, which puts positions beyond a few hundred off.

    Args:
        model: an `nn.Module`. Its buffers that no checkpoint holds keep their dtype; in 16 bits
            what transformers loads in fp32 (`_keep_in_fp32_modules_strict`, and
            `_keep_in_fp32_modules` in fp16 alone) is in fp32.
        device: where it is by default.

    Returns:
        The model.
    """
    held = model.state_dict(keep_vars=True).keys()
    tables = [(name, table) for name, table in model.named_buffers() if name not in held]
    wide = _kept_wide(model, dtype)
    model.to(device=device, dtype=dtype)
    for name, table in tables:
        place, _, leaf = name.rpartition(".")
        module: nn.Module = model.get_submodule(place)
        moved = module._buffers[leaf]
        assert moved is not None
        module._buffers[leaf] = table.to(moved.device)
    moved_to = model.state_dict(keep_vars=True)
    for name, (tensor, grad) in wide.items():
        kept = moved_to[name]
        kept.data = tensor.to(kept.device, torch.float32)
        if grad is not None:
            kept.grad = grad.to(kept.device, torch.float32)
    return model


def _kept_wide(
    model: nn.Module, dtype: torch.dtype
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Weights and buffers that transformers loads in fp32 beside `dtype`, and their gradients, as
    they are."""
    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not names:
        return {}
    wanted = re.compile("|".join(name.replace("*", ".*") for name in sorted(names)))
    return {
        name: (tensor.detach(), None if tensor.grad is None else tensor.grad.detach())
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.is_floating_point() and wanted.search(name)
    }
