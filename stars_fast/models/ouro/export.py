"""Checkpoints in the public layout, as Hugging Face readers and vLLM take them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from stars_fast.base.checks import check_integer
from stars_fast.models.folders import check_exists, check_folder, not_loaded
from stars_fast.models.ouro.config import OuroConfig, check_config

# The end of a ChatML turn, `<|im_end|>`: the published tokenizers give it id 2, while eos, bos and
# pad are all token 0.
IM_END = 2
BASE = "model"
"""Folder of a run with the configuration, the generation settings and the tokenizer."""


def write_base(model: Any, tokenizer: Any, run: Path) -> None:
    """Keep in a run folder what its checkpoints of weights lack to be a model.

    Args:
        model: an `OuroForCausalLM`.
        tokenizer: of transformers; None for none.
        run: the run folder; `BASE` is written in it.
    """
    folder = run / BASE
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    turns: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write the model of a run as a checkpoint in the public layout.

    The folder appears whole or not at all.

    Args:
        run: a run folder of an Ouro model, or an Ouro checkpoint (local folder or hub id).
        out: new or empty folder.
        step: checkpoint of the run; the newest by default.
        turns: written as `total_ut_steps`; those of the run's configuration by default.
        dtype: of the weights; that of the configuration by default.
        max_shard_size: of a safetensors file.

    Returns:
        `out`.

    Raises:
        FileExistsError: `out` holds files.
        TypeError, ValueError: `turns` or `dtype` is of the wrong type or out of range.
        stars_fast.base.errors.ConfigError: there is no such run or checkpoint in it.
    """
    if turns is not None:
        check_integer("turns", turns, 1)
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    out = Path(out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"out: expected a new or empty folder, got {out}")
    model, source = model_of(run, step)
    if turns is not None:
        model.config.total_ut_steps = turns
        check_config(model.config)
    model.to(dtype or model.config.dtype or torch.float32)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as folder:
        writing = Path(folder) / out.name
        _write(model, source, writing, max_shard_size)
        if out.exists():
            out.rmdir()
        writing.rename(out)
    return out


def _write(model: Any, source: str, folder: Path, max_shard_size: str) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    if (Path(source) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(source)
        set_stop(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if not Path(source).is_dir() or (Path(source) / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def model_of(run: str | Path, step: int | None) -> tuple[Any, str]:
    """The model of a run or of a checkpoint, and where its tokenizer is."""
    from stars_fast.base.errors import ConfigError
    from stars_fast.models.ouro.causal_lm import OuroForCausalLM
    from stars_fast.training.run.checkpoint import load_weights
    from stars_fast.training.run.folder import RunFolder

    base = Path(run) / BASE
    if (base / "config.json").exists():
        checkpoint = RunFolder(run).checkpoint(step)
        with torch.device("meta"):
            model = OuroForCausalLM(OuroConfig.from_pretrained(base))
        model.to_empty(device="cpu")
        model.tie_weights()  # the copy from the meta device has parted them
        load_weights(checkpoint, model)
        return model, str(base)
    try:
        check_exists(run)
        check_folder(run)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if step is not None:
        raise ConfigError(f"step: expected none for a checkpoint, which {run} is, got {step}")
    try:
        return OuroForCausalLM.from_pretrained(run, dtype="auto"), str(run)
    except OSError as error:
        raise ConfigError(not_loaded(run, error)) from error


def drop_stale_weights(folder: Path) -> None:
    """A folder that now holds shards may hold the one file of an earlier save, which readers would
    take first: remove it."""
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    if index.exists() and whole.exists() and index.stat().st_mtime > whole.stat().st_mtime:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        if whole.name not in named:
            whole.unlink()


def set_stop(model: Any) -> None:
    """Let generation stop at the end of a ChatML turn, where the settings know no other stop than
    the published token 0. What names its stops otherwise is left as it is."""
    generation = getattr(model, "generation_config", None)  # a model without a head has none
    if generation is None or model.config.vocab_size <= IM_END:
        return
    if generation.eos_token_id in (None, 0):
        generation.eos_token_id = [IM_END, 0]
