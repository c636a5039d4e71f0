"""What a checkpoint must hold: exactly the weights of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_GATE = "early_exit_gate."


def check_loaded(source: str, model: Any, info: dict[str, Any]) -> None:
    """Refuse a model whose weights did not all come from the checkpoint.

    Args:
        info: transformers' loading info: missing_keys, unexpected_keys, mismatched_keys.

    Raises:
        ValueError: keys are missing, not expected or of another shape.
    """
    gate_may_miss = model.config.gate == "ignored"
    missing = [k for k in info["missing_keys"] if not (gate_may_miss and _GATE in k)]
    # A model without a head reads checkpoints that have one.
    unused = () if hasattr(model, "lm_head") else ("lm_head.weight",)
    problems = [
        _listed("are missing", missing),
        _listed("are not expected", set(info["unexpected_keys"]).difference(unused)),
        _listed("have another shape", (_shapes(each) for each in info["mismatched_keys"])),
    ]
    if any(problems):
        raise ValueError(
            f"{source}: the checkpoint does not fit the model: " + "; ".join(filter(None, problems))
        )


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
