"""Checks of a folder that is given as a model, before anything is loaded from it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

EXPECTED = (
    "a run folder (config.yaml, checkpoints), an Ouro checkpoint (config.json, model.safetensors, "
    "tokenizer files) or a hub id of one"
)

_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_MODELS = ("config.yaml", "config.json", "adapter_config.json")


def check_exists(path: str | Path) -> None:
    """Refuse a path where nothing is, unless it can be a hub id.

    `a/b` where `a` is a folder of runs is no hub id, and no question to the hub.

    Raises:
        ValueError: there is nothing; it names the run folders beside it.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return
    if place.exists():
        raise ValueError(f"{path} is a file: expected {EXPECTED}")
    beside = sorted(str(each.parent) for each in place.parent.glob("*/config.yaml"))
    inside = place.parent != Path() and (beside or place.parts[0] == "runs")
    if not inside and _HUB_ID.fullmatch(str(path)):
        return
    near = f"; there is {', '.join(beside[:8])}" if beside else ""
    raise ValueError(f"{path} does not exist: expected {EXPECTED}{near}")


def check_folder(path: str | Path, types: Sequence[str] = ("ouro",)) -> None:
    """Refuse a folder that holds no whole checkpoint; what is no folder is left alone.

    Args:
        types: `model_type` that its config.json may name.

    Raises:
        ValueError: it says what the folder holds instead, and the way out.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    reason = _reason(folder, types)
    if reason:
        raise ValueError(f"{path} {reason}")


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder holds a tokenizer; of the hub it is taken to."""
    folder = Path(path)
    return not folder.is_dir() or (folder / "tokenizer_config.json").exists()


def not_loaded(path: str | Path, error: Exception) -> str:
    """The message of a failure to load a model, from a folder or from the hub."""
    why = str(error).split("\n")[0]
    if Path(path).expanduser().is_dir():
        return f"{path}: can't be loaded: {why}"
    where = "does not exist here and can't be loaded from the hub"
    return f"{path} {where} ({why}); expected {EXPECTED}"


def _reason(folder: Path, types: Sequence[str]) -> str | None:
    if (folder / "adapter_config.json").exists():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        of = f" of {base}" if base else ""
        return (
            f"holds a PEFT adapter{of} (adapter_config.json), not a whole model: merge it into its "
            f"base model first, stars-fast export {folder} DIR, and give DIR"
        )
    if (folder / ".metadata").exists():
        step = folder.name.removeprefix("step-").lstrip("0")
        return (
            "is one of the checkpoints of a run: give the run folder, "
            f"{folder.resolve().parent.parent}, and --step {step}"
        )
    if (folder / "model" / "config.json").exists():
        return f"is a run folder, not a checkpoint: write one with stars-fast export {folder} DIR"
    if (folder / "checkpoints").is_dir() or (folder / "config.yaml").exists():
        return (
            "is no run of an Ouro model (model/config.json is missing); of another run, stars-fast "
            f"export {folder} DIR writes a checkpoint"
        )
    files = sorted(each.name for each in folder.iterdir())
    if (folder / "config.json").exists():
        return _unfit(folder, files, types)
    return f"{_content(folder, files)}: expected {EXPECTED}"


def _content(folder: Path, files: list[str]) -> str:
    inside = [n for n in files if any((folder / n / kind).exists() for kind in _MODELS)]
    if not files:
        return "is an empty folder"
    if any(name.endswith(".gguf") for name in files):
        return "holds GGUF weights, which can't be trained or read here"
    if inside:
        found = ", ".join(inside[:4])
        return f"holds no config.yaml and no config.json, but {found} in it: give one of these"
    if any(name in files for name in ("tokenizer.json", "tokenizer_config.json")):
        return "holds a tokenizer alone, no config.json and no weights"
    if any(name.endswith((".safetensors", ".bin")) for name in files):
        return "holds weights without a config.json"
    return f"holds no config.yaml and no config.json ({', '.join(files[:6])})"


def _unfit(folder: Path, files: list[str], types: Sequence[str]) -> str | None:
    """The fault of a folder that has a config.json; None where it has none."""
    kind = read_json(folder / "config.json").get("model_type")
    if kind not in types:
        what = "Ouro model" if types == ("ouro",) else "looped model"
        named = " or ".join(types)
        return f"is no {what}: expected model_type {named} in its config.json, got {kind!r}"
    for name in _WEIGHTS:  # in the order in which transformers looks for them
        index = f"{name}.index.json"
        if name in files:
            return None
        if index in files:
            shards = set(read_json(folder / index).get("weight_map", {}).values())
            missing = sorted(shards - set(files))
            if missing:
                return f"lacks {len(missing)} of the {len(shards)} shards that {index} names: " + (
                    ", ".join(missing[:4])
                )
            return None
    gguf = " GGUF files can't be read here;" if any(n.endswith(".gguf") for n in files) else ""
    return (
        f"has a config.json and no weights:{gguf} expected {_WEIGHTS[0]}, or "
        f"{_WEIGHTS[0]}.index.json with the shards that it names"
    )


def read_json(file: Path) -> dict:
    """A mapping from a JSON file.

    Raises:
        ValueError: it names it.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: can't be read as JSON in UTF-8: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: expected a mapping, got {type(found).__name__}")
    return found
