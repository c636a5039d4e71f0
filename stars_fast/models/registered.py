"""Looped language models as transformers knows its own: by their configurations and names."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def register(config: Any, head: Any, base: Any = None) -> None:
    """Let the auto classes find a looped language model by its `model_type`.

    Its name also joins those by which transformers' `Trainer` tells that a token's target is the
    next one: with `label_smoothing_factor` it makes the loss itself.

    Args:
        config: its class of configurations.
        head: its class with a head.
        base: that without, where there is one.
    """
    kind = config.model_type
    AutoConfig.register(kind, config, exist_ok=True)
    if base is not None:
        AutoModel.register(config, base, exist_ok=True)
    AutoModelForCausalLM.register(config, head, exist_ok=True)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(kind, head.__name__)
