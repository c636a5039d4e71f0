"""Models of runs as checkpoints, which other readers take: of Ouro, Hugging Face and vLLM."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from stars_fast.base.checks import check_integer
from stars_fast.base.errors import ConfigError
from stars_fast.models.adapter_folder import write_adapter
from stars_fast.models.families import section_of
from stars_fast.models.merge import merge
from stars_fast.models.saved import ModelSource, find_model, load_model, tokenizer_place

Adapter = Literal["merge", "keep"]
"""Adapters are added to the weights they adapt, or written alone."""


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    turns: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    adapter: Adapter = "merge",
) -> Path:
    """Write the model of a run as a checkpoint in the layout of its family.

    Adapters are added to the weights in fp32, which are then rounded to `dtype`.

    The folder appears whole or not at all.

    Args:
        run: a run folder, a checkpoint (local folder or hub id), or a folder of a PEFT adapter.
        out: new or empty folder.
        step: checkpoint of the run; the newest by default.
        turns: written as those of the model; its own by default.
        dtype: of the weights; that of the configuration by default.
        max_shard_size: of a file of weights.
        adapter: "keep" writes the adapters of a run as PEFT's folders are, with the path of the
            base model, in the place of a whole model.

    Returns:
        `out`.

    Raises:
        FileExistsError: `out` holds files.
        TypeError, ValueError: `turns` or `dtype` is of the wrong type or out of range.
        stars_fast.base.errors.ConfigError: there is no such run or checkpoint in it, or nothing to
            "keep" in it.
    """
    if turns is not None:
        check_integer("turns", turns, 1)
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    out = Path(out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"out: expected a new or empty folder, got {out}")
    source = find_model(run, step)
    base = None if adapter == "merge" else _base_of(source, turns, dtype)
    model = load_model(source, torch.float32 if source.adapted else None)
    beside, tokenizer = source.beside, tokenizer_place(source)
    on_the_hub = source.step is None and not Path(tokenizer).is_dir()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as folder:
        writing = Path(folder) / out.name
        if base is not None:
            write_adapter(model, writing, base, source.family.causal_lm)
        else:
            source.family.export(
                merge(model), writing, beside=beside, dtype=dtype, turns=turns, shard=max_shard_size
            )
        if on_the_hub or (Path(tokenizer) / "tokenizer_config.json").exists():
            source.family.tokenizer(tokenizer).save_pretrained(writing)
        if out.exists():
            out.rmdir()
        writing.rename(out)
    return out


def _base_of(source: ModelSource, turns: int | None, dtype: Any) -> str:
    """The base model that the adapters of a run are to be written for, folders by their whole path.

    Raises:
        ConfigError: there are no adapters in it or no base to point to, or an option is of whole
            models.
    """
    option = next((n for n, v in (("turns", turns), ("dtype", dtype)) if v is not None), None)
    if option is not None:
        raise ConfigError(f"{option}: expected none with adapter keep, which writes no whole model")
    if source.step is None or not source.adapted:
        raise ConfigError(
            f"adapter: expected merge for {source.path}, which is no run with lora.rank, got keep"
        )
    base = source.family.base(section_of(source.run))
    if base is None:
        raise ConfigError(
            f"adapter: expected merge for {source.path}, whose base model the package made: there "
            "is no folder or hub id that an adapter could point to"
        )
    folder = Path(base).expanduser()
    return str(folder.resolve()) if folder.is_dir() else base
