"""Tiny Huginn checkpoints with random weights, in the public format, for tests and small recipes.

Written key by key and field by field, without the model classes of this package, so that reading
one is a test of them. Keys and fields are those of recpre/raven_modeling_minimal.py and
raven_config_minimal.py (https://github.com/seal-rg/recurrent-pretraining), and of what
convert_pretrained_model/ of https://github.com/mcleish7/retrofitting-recurrence sets in them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stars_fast.base.checks import check_integer
from stars_fast.data.tiny_tokenizer import (
    SMALLEST_VOCABULARY,
    TINY_VOCABULARY,
    train_tokenizer,
    write_json,
    write_tokenizer,
)
from stars_fast.models.ouro.tiny import random_weights, write_weights

SIZES: dict[str, Any] = {
    "n_embd": 32,
    "n_heads": 4,
    "intermediate_size": 64,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 1,
    "block_size": 512,
    "mean_recurrence": 4,
}
"""Default sizes."""

SETTINGS: dict[str, Any] = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "norm_eps": 1e-6,
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "init_strategy": "takase",
    "init_orthogonal": False,
    "state_init": "like-init",
    "injection_type": "linear",
    "sampling_scheme": "poisson-lognormal-filling",
    "mean_backprop_depth": 8,
    "bias": False,
    "qk_bias": True,
    "tie_embeddings": True,
    "activation_checkpoint_impl": "per-iteration",
    "rope_base": 50_000,
    "test_time_noise": 0,
    "test_time_noise_type": "fixed",
}
"""Settings of huginn-0125."""

RETROFITTED: dict[str, dict[str, Any]] = {
    "llama": {
        "norm_eps": 1e-5,
        "rope_base": 500_000.0,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "max_position_embeddings": 131072,
    },
    "tinyllama": {
        "norm_eps": 1e-5,
        "rope_base": 500_000.0,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2048,
    },
    "olmo2": {
        "norm_eps": 1e-6,
        "rope_base": 500_000.0,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 4096,
    },
}
"""Settings of retrofitted models instead, by what they were made from: Llama-3.2, TinyLlama-1.1B,
OLMo-2-0425-1B."""

SHAPES = ("huginn", *RETROFITTED)
"""The shapes that a tiny checkpoint can have."""


def write_tiny_huginn(
    folder: str | Path,
    *,
    shape: str = "huginn",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    vocab_size: int = TINY_VOCABULARY,
    **config: Any,
) -> Path:
    """Write a tiny Huginn checkpoint with its tokenizer.

    Args:
        folder: new or empty.
        shape: huginn, or that of a retrofitted llama, tinyllama or olmo2.
        seed: of the weights, drawn in fp32 and then rounded.
        dtype: of the weights.
        shards: number of safetensors files; more than one come with an index.
        vocab_size: rows of embedding and head, at least 259.
        config: fields of config.json, instead of those in `SIZES`, `SETTINGS` and `RETROFITTED`, or
            `num_key_value_heads`, in retrofitted shapes half of `n_heads` by default.

    Returns:
        `folder`.

    Raises:
        FileExistsError: `folder` holds files already.
        ValueError: a shape, size or number of shards that does not exist.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape: expected one of {SHAPES}, got {shape!r}")
    check_integer("vocab_size", vocab_size, SMALLEST_VOCABULARY)
    check_integer("shards", shards, 1)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if held := sorted(path.name for path in folder.iterdir()):
        raise FileExistsError(f"folder: expected a new or empty one, got {folder} with {held}")
    fields = _configuration(shape, vocab_size, dtype, config)
    weights = random_weights(weight_shapes(fields, shape), seed, torch.float32)
    if shape == "huginn":
        weights["freqs_cis"] = _rotary_table(fields)
    write_json(folder / "config.json", fields)
    stops = {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0}
    write_json(folder / "generation_config.json", stops)
    table = "freqs_cis"  # fp32 in checkpoints of any dtype
    rounded = {key: x if key == table else x.to(dtype) for key, x in weights.items()}
    write_weights(folder, rounded, shards)
    write_tokenizer(folder, train_tokenizer(vocab_size), fields["block_size"])
    return folder


def weight_shapes(config: dict[str, Any], shape: str) -> dict[str, tuple[int, ...]]:
    """Key -> shape of all weights of a checkpoint, from the fields of its config.json."""
    width, inner, heads = config["n_embd"], config["intermediate_size"], config["n_heads"]
    head_dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "attn.Wqkv.weight": ((heads + 2 * kv_heads) * head_dim, width),
        "attn.proj.weight": (width, heads * head_dim),
        "mlp.fc.weight": (2 * inner, width),
        "mlp.proj.weight": (width, inner),
    }
    norms = 4 if shape == "huginn" else 2
    layer |= {f"norm_{i + 1}.weight": (width,) for i in range(norms)}
    if config["qk_bias"]:
        layer["attn.qk_bias"] = (2, 1, heads, head_dim)
    if shape == "olmo2":
        layer["attn.q_norm.weight"] = (heads * head_dim,)
        layer["attn.k_norm.weight"] = (kv_heads * head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["padded_vocab_size"], width),
        "transformer.adapter.weight": (width, 2 * width),
        "transformer.ln_f.weight": (width,),
    }
    if config["bias"]:
        shapes["transformer.adapter.bias"] = (width,)
    parts = {
        "prelude": "n_layers_in_prelude",
        "core_block": "n_layers_in_recurrent_block",
        "coda": "n_layers_in_coda",
    }
    for part, number in parts.items():
        for i in range(config[number]):
            shapes |= {f"transformer.{part}.{i}.{name}": each for name, each in layer.items()}
    if not config["tie_embeddings"]:
        shapes["lm_head.weight"] = (config["padded_vocab_size"], width)
    return shapes


def _configuration(
    shape: str, vocab_size: int, dtype: torch.dtype, given: dict[str, Any]
) -> dict[str, Any]:
    fields = SIZES | SETTINGS
    if shape != "huginn":
        fields |= {"qk_bias": False, "tie_embeddings": False} | RETROFITTED[shape]
        fields["num_key_value_heads"] = max(given.get("n_heads", fields["n_heads"]) // 2, 1)
    known = {*fields, "num_key_value_heads", "initial_state_mode"}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"config: expected fields among {sorted(known)}, got {unknown}")
    fields |= given
    for name in SIZES:
        check_integer(name, fields[name], 0 if name.endswith(("prelude", "coda")) else 1)
    fields.setdefault("num_key_value_heads", fields["n_heads"])
    width = fields["n_embd"]
    ends = fields["n_layers_in_prelude"] + fields["n_layers_in_coda"]
    core, turns = fields["n_layers_in_recurrent_block"], fields["mean_recurrence"]
    std, depth = math.sqrt(2 / (5 * width)), ends + core * turns
    return fields | {
        "architectures": ["RavenForCausalLM"],
        "auto_map": {
            "AutoConfig": "raven_config_minimal.RavenConfig",
            "AutoModelForCausalLM": "raven_modeling_minimal.RavenForCausalLM",
        },
        "model_type": "huginn_raven",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocab_size,
        "padded_vocab_size": vocab_size,
        "padding_multiple": 4096,
        "n_layers": ends + core,
        "head_dim": width // fields["n_heads"],
        "effective_expected_depth": depth,
        "init_values": {
            "std": std,
            "out_proj": std / math.sqrt(2 * depth),
            "embedding": std,
            "embed_scale": math.sqrt(width) if shape == "huginn" else 1.0,
        },
    }


def _rotary_table(config: dict[str, Any]) -> Tensor:
    """[1, block_size, 1, head_dim / 2, 2] fp32: cosines and sines by position and pair."""
    half = config["head_dim"] // 2
    steps = torch.arange(half, dtype=torch.float64) / half
    angles = torch.outer(
        torch.arange(config["block_size"], dtype=torch.float64), config["rope_base"] ** -steps
    )
    return torch.stack((angles.cos(), angles.sin()), -1).float()[None, :, None]
