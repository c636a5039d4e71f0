"""Checkpoints as they are read and written: the layout of their layers, and the rotary table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stars_fast.models.huginn.config import HuginnConfig
from stars_fast.models.ouro.rotary import Rotary

TABLE = "freqs_cis"
"""Key of Huginn's rotary table, a buffer of the public model. It follows from the configuration:
written for public readers, and not read."""

_QUIET: dict[str, Any] = {
    f"_raise_exceptions_for_{what}": False
    for what in ("missing_entries", "gated_repo", "connection_errors")
}
_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json")


def rotary_table(config: HuginnConfig, rotary: Rotary) -> Tensor:
    """Cosines and sines as checkpoints hold them, [1, block_size, 1, head_dim / 2, 2] fp32."""
    with torch.device("cpu"):
        cos, sin = rotary(torch.arange(config.block_size).unsqueeze(0), torch.float32)
    half = config.head_dim // 2
    return torch.stack((cos[..., :half], sin[..., :half]), -1).unsqueeze(2).contiguous()


def layout_of(path: str | Path, **where: Any) -> str | None:
    """The layout of a checkpoint's layers, told by the keys of its weights; None where there are no
    files that name them.

    Args:
        path: a folder, or a hub id.
        where: `subfolder`, `revision`, `cache_dir` and the like, of transformers.
    """
    keys = _keys(path, where)
    if keys is None:
        return None
    names = {key.partition(".attn.")[2] for key in keys}
    if any(key.endswith(".norm_4.weight") for key in keys):
        return "huginn"
    return "olmo2" if "q_norm.weight" in names else "llama"


def _keys(path: str | Path, where: dict[str, Any]) -> Iterable[str] | None:
    from transformers.utils.hub import cached_file

    for name in _FILES:
        found = cached_file(str(path), name, **_QUIET, **where)
        if found is None:
            continue
        if name.endswith(".json"):
            return json.loads(Path(found).read_text(encoding="utf-8"))["weight_map"]
        from safetensors import safe_open

        with safe_open(found, "pt") as file:
            return list(file.keys())
    return None
