"""Folders that hold a PEFT adapter and not the model that it adapts, as PEFT writes them:
adapter_config.json, which names the base model, and adapter_model.safetensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from stars_fast.base.optional import need
from stars_fast.models.folders import read_json
from stars_fast.models.lora import ADAPTER, adapted_layers

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_OLDER = "adapter_model.bin"
_PREFIX = "base_model.model."
"""PEFT's name of the adapted model within its own."""

_NOT_TAKEN = ("modules_to_save", "layer_replication", "alora_invocation_tokens")
"""Fields that an adapter's configuration may not have set: whole modules, more layers, and (aLoRA)
an adapter of the tokens after a certain sequence alone, which PEFT's own model looks for."""


def adapter_base(path: str | Path) -> str | None:
    """The base model, a folder or hub id, of the adapter in a local folder; None for a folder
    without one, and for what is no folder.

    Raises:
        ValueError: the adapter names no base model, or one of a certain revision, or its
            configuration can't be read.
    """
    file = Path(path).expanduser() / CONFIG
    if not file.exists():
        return None
    config = read_json(file)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"{file}: base_model_name_or_path: expected the model that it adapts, got {base!r}"
        )
    if revision not in (None, "main") and not Path(base).expanduser().is_dir():
        raise ValueError(
            f"{file}: revision: expected null or main, got {revision!r}; download that revision of "
            f"{base} and write its folder as base_model_name_or_path"
        )
    return base


def load_adapter(path: str | Path, model: nn.Module) -> None:
    """Put the LoRA adapter of a folder on its base model, in place.

    Raises:
        ValueError: it is no LoRA adapter, asks for more than is taken (it is named), does not fit
            the model, or its weights are missing or can't be read.
    """
    peft = need("peft", "LoRA adapters")
    damaged = need("safetensors", "checkpoints").SafetensorError
    folder = Path(path).expanduser()
    if not any((folder / name).exists() for name in (_WEIGHTS, _OLDER)):
        raise ValueError(f"{path}: expected {_WEIGHTS} beside {CONFIG}, got a folder without it")
    config = peft.PeftConfig.from_pretrained(str(path))
    lora = config.peft_type == peft.PeftType.LORA
    asked = {name: getattr(config, name, None) for name in _NOT_TAKEN}
    if not lora or any(asked.values()):
        said = [f"{name} {value}" for name, value in asked.items() if value]
        raise ValueError(
            f"{path}: expected a LoRA adapter of all tokens and no whole modules or more layers, "
            f"got {', '.join([config.peft_type.value, *said])}"
        )
    try:
        peft.inject_adapter_in_model(config, model, ADAPTER)
        weights = peft.load_peft_weights(str(path), device="cpu")
        weights = {name.removeprefix(_PREFIX): value for name, value in weights.items()}
        found = peft.set_peft_model_state_dict(model, weights, ADAPTER)
    except (damaged, EOFError) as error:
        raise ValueError(f"{path}: its adapter's weights can't be read: {error}") from error
    except (RuntimeError, ValueError) as error:
        why = " ".join(line.strip() for line in str(error).split("\n")[:2])  # of one a weight
        raise ValueError(f"{path}: the adapter does not fit its base: {why}") from error
    missing = [name for name in found.missing_keys if "lora_" in name]
    if missing or found.unexpected_keys:
        raise ValueError(
            f"{path}: the adapter does not fit its base: {len(missing)} keys are missing, "
            f"{len(found.unexpected_keys)} are not expected: "
            + ", ".join([*missing, *found.unexpected_keys][:8])
        )
    for layer in adapted_layers(model).values():
        layer.cast_input_dtype_enabled = False  # all is brought into one dtype


def write_adapter(model: Any, folder: Path, base: str, causal_lm: bool) -> None:
    """Write the adapter of a model, in fp32 if it is kept so.

    Args:
        folder: it is made.
        base: folder or hub id of the model without it.
        causal_lm: whether that is a causal language model of transformers.
    """
    peft, files = need("peft", "LoRA adapters"), need("safetensors.torch", "checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    weights = peft.get_peft_model_state_dict(model, adapter_name=ADAPTER)
    weights = {_PREFIX + name: value.contiguous() for name, value in weights.items()}
    files.save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config[ADAPTER])
    config.base_model_name_or_path = base
    config.task_type = peft.TaskType.CAUSAL_LM if causal_lm else None
    config.inference_mode = True
    config.save_pretrained(str(folder))
