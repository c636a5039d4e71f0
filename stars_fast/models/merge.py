"""Adapters added to the weights they adapt, which leaves a plain model."""

from __future__ import annotations

import torch
from torch import nn

from stars_fast.models.lora import adapted_layers


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Add every adapter of `model` to its weight, in the weight's dtype, and take PEFT's modules
    out, in place. Without adapters it is left as it is.

    Returns:
        `model`.

    Raises:
        ValueError: what was added is not finite.
    """
    for name, layer in adapted_layers(model).items():
        layer.merge(safe_merge=True)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model
