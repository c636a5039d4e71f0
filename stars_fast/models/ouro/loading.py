"""Checkpoints as they are read and written: exactly the weights, and where generation stops."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The end of a ChatML turn, `<|im_end|>`: the published tokenizers give it id 2, while eos, bos and
# pad are all token 0.
IM_END = 2
GATE_KEYS = "early_exit_gate."


def check_loaded(
    source: str, model: Any, info: dict[str, Any], may_miss: str | None = None
) -> None:
    """Refuse a model whose weights did not all come from the checkpoint.

    Args:
        info: transformers' loading info: missing_keys, unexpected_keys, mismatched_keys.
        may_miss: part of the keys that a checkpoint need not have.

    Raises:
        ValueError: keys are missing, not expected or of another shape.
    """
    missing = [k for k in info["missing_keys"] if may_miss is None or may_miss not in k]
    # A model without a head reads checkpoints that have one.
    unused = () if hasattr(model, "lm_head") else ("lm_head.weight",)
    check_keys(source, missing, set(info["unexpected_keys"]).difference(unused), info)


def check_keys(
    source: str, missing: Iterable[str], unexpected: Iterable[str], info: dict[str, Any]
) -> None:
    """Raise ValueError where keys are missing, not expected or, by transformers' loading info, of
    another shape."""
    problems = [
        _listed("are missing", missing),
        _listed("are not expected", unexpected),
        _listed("have another shape", (_shapes(each) for each in info["mismatched_keys"])),
    ]
    if any(problems):
        raise ValueError(
            f"{source}: the checkpoint does not fit the model: " + "; ".join(filter(None, problems))
        )


def drop_stale_weights(folder: Path) -> None:
    """A folder that now holds shards may hold the one file of an earlier save, which readers would
    take first: remove it."""
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    if index.exists() and whole.exists() and index.stat().st_mtime > whole.stat().st_mtime:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        if whole.name not in named:
            whole.unlink()


def set_stop(model: Any, ends: Iterable[int] = ()) -> None:
    """Let generation stop at the end of a ChatML turn too, and at the stops of the model's
    configuration, where its settings know no other stop than the published token 0. What names its
    stops otherwise is left as it is.

    Args:
        ends: tokens that stop it besides, whatever the settings name.
    """
    generation = getattr(model, "generation_config", None)  # a model without a head has none
    if generation is None:
        return
    stops = stop_ids(generation)
    if generation.eos_token_id in (None, 0) and model.config.vocab_size > IM_END:
        stops = [IM_END, 0, *_ids(model.config.eos_token_id)]
    unite_stops(generation, [*stops, *ends])


def unite_stops(generation: Any, stops: Iterable[int]) -> None:
    """Let generation by these settings stop at `stops`, each said once, and nowhere else."""
    united = list(dict.fromkeys(stops))
    if united != stop_ids(generation):
        generation.eos_token_id = united


def stop_ids(generation: Any) -> list[int]:
    """The tokens at which generation by these settings stops."""
    return _ids(generation.eos_token_id)


def _ids(tokens: int | list[int] | None) -> list[int]:
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else list(tokens)


def _listed(what: str, keys: Iterable[str]) -> str:
    keys = sorted(keys)
    if not keys:
        return ""
    shown = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
    return f"{len(keys)} keys {what}: {shown}"


def _shapes(mismatch: Any) -> str:
    if isinstance(mismatch, str):
        return mismatch
    key, found, expected = mismatch
    return f"{key} ({list(found)} in the checkpoint, {list(expected)} in the model)"
