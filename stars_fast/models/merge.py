"""Adapters added to the weights they adapt, which leaves a plain model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stars_fast.models.lora import ADAPTER, adapted_layers


@torch.no_grad()
def kept_share(model: nn.Module, dtype: torch.dtype) -> float:
    """The part of what plain LoRA adapters add to their weights, along itself, that is left once
    the sums are rounded to `dtype`; 1 where they add nothing.

    Numbers in bf16 lie 2^-7 to 2^-8 of themselves apart: a sum with less than half of that is the
    weight again.
    """
    left = total = 0.0
    for layer in adapted_layers(model).values():
        if layer.lora_variant:
            continue
        weight = layer.get_base_layer().weight
        added = layer.get_delta_weight(ADAPTER)
        after = (weight + added).to(dtype).to(weight.dtype)
        left += float(((after - weight) * added).sum())
        total += float(added.square().sum())
    return left / total if total else 1.0


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Add every adapter of `model` to its weight, in the weight's dtype, and take PEFT's modules
    out, in place: with them the rows of tokens that were trained beside adapters
    (`trainable_token_indices`). Without adapters it is left as it is.

    Returns:
        `model`.

    Raises:
        ValueError: what was added is not finite, or PEFT can't add it, as a bias to a map without
            one.
    """
    for name, layer in adapted_layers(model).items():
        try:
            layer.merge(safe_merge=True)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(f"adapter: can't be merged into {name}: {error}") from error
        _replace(model, name, layer.get_base_layer())
    wrapped = [name for name, each in model.named_modules() if hasattr(each, "token_adapter")]
    for name in wrapped:
        wrapper: Any = model.get_submodule(name)
        _replace(model, name, wrapper.unload_and_optionally_merge_module(True, True, None))
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
