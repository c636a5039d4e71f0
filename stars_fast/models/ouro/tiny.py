"""Tiny Ouro checkpoints with random weights, in the public format, for tests and small recipes.

Written key by key and field by field, without the model classes of this package, so that reading
one is a test of them. The tokenizer is that of `data.tiny_tokenizer`.
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

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
"""Default sizes; heads of keys and values, and their width, follow from them."""

SETTINGS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_scaling": None,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""Settings of the published models."""

EXTENSIONS = ("gate", "early_exit_step", "convergence_tol", "pad_token_id")
"""Fields that published configurations lack; written only where given."""

_CODE = ("configuration_ouro", "modeling_ouro")


def write_tiny_ouro(
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    vocab_size: int = TINY_VOCABULARY,
    remote_code: bool = True,
    **config: Any,
) -> Path:
    """Write a tiny Ouro checkpoint with its tokenizer.

    Args:
        folder: new or empty.
        seed: of the weights. They are drawn in fp32 and then rounded, so that checkpoints of one
            seed differ by the rounding of their dtype alone.
        dtype: of the weights.
        shards: number of safetensors files; more than one come with an index.
        vocab_size: rows of embedding and head, at least 259. The tokenizer has as many tokens, or
            fewer where its training text has no more to merge.
        remote_code: write the model's two code files too, and `auto_map` that leads to them, as
            published checkpoints have them. They raise ImportError: a reader must not run them.
        config: fields of config.json, instead of those in `SIZES` and `SETTINGS`, or one of
            `num_key_value_heads`, `head_dim`, `layer_types`, `max_window_layers`,
            `rope_parameters` (takes the place of `rope_theta` and `rope_scaling`) and `EXTENSIONS`.

    Returns:
        `folder`.

    Raises:
        FileExistsError: `folder` holds files already.
        TypeError: a field of the configuration that does not exist.
        ValueError: a size or a number of shards out of range.
    """
    fields = _configuration(vocab_size, dtype, remote_code, config)
    shapes = weight_shapes(fields)
    check_integer("shards", shards, 1)
    if shards > len(shapes):
        raise ValueError(f"shards: expected at most the {len(shapes)} weights, got {shards}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if held := sorted(path.name for path in folder.iterdir()):
        raise FileExistsError(f"folder: expected a new or empty folder, got {folder} with {held}")

    write_json(folder / "config.json", fields)
    # The published bos and eos are token 0; a chat has to stop at the end of the message too.
    stops = {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0}
    write_json(folder / "generation_config.json", stops)
    write_weights(folder, random_weights(shapes, seed, dtype), shards)
    write_tokenizer(folder, train_tokenizer(vocab_size), fields["max_position_embeddings"])
    for name in _CODE if remote_code else ():
        text = f'raise ImportError("{name}.py: code of a checkpoint must not be run")\n'
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Key -> shape of all weights of an Ouro checkpoint, from the fields of its config.json."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width)
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "input_layernorm_2": (width,),
            "post_attention_layernorm": (width,),
            "post_attention_layernorm_2": (width,),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (width,)
    shapes["model.early_exit_gate.weight"] = (1, width)
    shapes["model.early_exit_gate.bias"] = (1,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weights that keep states, attention scores and logits at about 1, and no two heads or norms
    alike, so that a swapped weight shows."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if key == "model.embed_tokens.weight":
            drawn = noise
        elif len(shape) == 2:
            drawn = noise / math.sqrt(shape[1])
        elif key.endswith("bias"):
            drawn = noise.sign() * (0.25 + noise.abs() / 4)
        else:
            drawn = 1 + noise.clamp(-3, 3) / 5
        weights[key] = drawn.to(dtype)
    return weights


def _configuration(
    vocab_size: int, dtype: torch.dtype, remote_code: bool, given: dict[str, Any]
) -> dict[str, Any]:
    derived = ("num_key_value_heads head_dim layer_types max_window_layers rope_parameters").split()
    known = {*SIZES, *SETTINGS, *derived, *EXTENSIONS}
    if unknown := sorted(set(given) - known):
        raise TypeError(f"config: expected fields among {sorted(known)}, got {unknown}")
    check_integer("vocab_size", vocab_size, SMALLEST_VOCABULARY)
    fields = SIZES | SETTINGS | given
    for name in SIZES:
        check_integer(name, fields[name], 1)
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    fields.setdefault("num_key_value_heads", heads)
    fields.setdefault("head_dim", fields["hidden_size"] // heads)
    fields.setdefault("layer_types", ["full_attention"] * layers)
    fields.setdefault("max_window_layers", layers)
    for name in ("num_key_value_heads", "head_dim"):
        check_integer(name, fields[name], 1)
    if "rope_parameters" in given:
        del fields["rope_theta"], fields["rope_scaling"]
    if remote_code:
        fields["auto_map"] = {
            "AutoConfig": "configuration_ouro.OuroConfig",
            "AutoModel": "modeling_ouro.OuroModel",
            "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM",
        }
    return fields | {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocab_size,
    }


def write_weights(folder: Path, weights: dict[str, Tensor], shards: int) -> None:
    """Write `model.safetensors`, or several files of them and an index."""
    from safetensors.torch import save_file

    keys = list(weights)
    bounds = [len(keys) * i // shards for i in range(shards + 1)]
    weight_map: dict[str, str] = {}
    for i in range(shards):
        name = (
            "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        )
        part = {key: weights[key] for key in keys[bounds[i] : bounds[i + 1]]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        size = sum(weight.numel() * weight.element_size() for weight in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
