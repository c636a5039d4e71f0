"""Checkpoints in the public layout, as Hugging Face readers and vLLM take them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

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
    set_stop(model)
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
        stars_fast.training.tree.ConfigError: there is no such run or checkpoint in it.
    """
    from transformers import AutoTokenizer, GenerationConfig

    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"out: expected a new or empty folder, got {out}")
    model, source = _model_of(run, step)
    if turns is not None:
        model.config.total_ut_steps = turns
    model.to(dtype or model.config.dtype or torch.float32)
    if (Path(source) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(source)
    writing = out.with_name(f"{out.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    model.save_pretrained(writing, max_shard_size=max_shard_size)
    if not Path(source).is_dir() or (Path(source) / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(source).save_pretrained(writing)
    if out.exists():
        out.rmdir()
    writing.rename(out)
    return out


def _model_of(run: str | Path, step: int | None) -> tuple[Any, str]:
    """The model of a run or of a checkpoint, and where its tokenizer is."""
    from stars_fast.models.ouro.causal_lm import OuroForCausalLM
    from stars_fast.models.ouro.config import OuroConfig
    from stars_fast.training.checkpoint import load_weights
    from stars_fast.training.run_folder import RunFolder
    from stars_fast.training.tree import ConfigError

    base = Path(run) / BASE
    if (base / "config.json").exists():
        checkpoint = RunFolder(run).checkpoint(step)
        with torch.device("meta"):
            model = OuroForCausalLM(OuroConfig.from_pretrained(base))
        load_weights(checkpoint, model.to_empty(device="cpu"))
        return model, str(base)
    if (Path(run) / "checkpoints").exists():
        raise ConfigError(
            f"{run} is no run of an Ouro model ({BASE}/config.json is missing); the models of the "
            "addition study have no public layout"
        )
    if step is not None:
        raise ConfigError(f"step: expected none for a checkpoint, which {run} is, got {step}")
    try:
        return OuroForCausalLM.from_pretrained(run, dtype="auto"), str(run)
    except OSError as error:
        raise ConfigError(f"{run}: neither a run folder nor an Ouro checkpoint: {error}") from error


def write_checkpoint(
    model: Any, save: Callable[..., None], folder: Path, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Write config, weights and generation config.

    Args:
        save: transformers' `save_pretrained` of the model.
        args, kwargs: its arguments after the folder.
    """
    set_stop(model)
    save(folder, *args, **kwargs)
    path = folder / "config.json"
    if path.exists():  # not on the ranks that leave saving to rank 0
        config = json.loads(path.read_text(encoding="utf-8"))
        config.pop("auto_map", None)  # this checkpoint brings no code
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def set_stop(model: Any, im_end: int = IM_END) -> None:
    """Let generation stop at the end of a ChatML turn, besides the tokens it stops at already."""
    generation = model.generation_config
    if generation is None or im_end >= model.config.vocab_size:
        return
    stops = generation.eos_token_id
    stops = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    if im_end not in stops:
        generation.eos_token_id = [im_end, *stops]
