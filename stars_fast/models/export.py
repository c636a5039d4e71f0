"""Models of runs as checkpoints, which other readers take: of Ouro, Hugging Face and vLLM."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from stars_fast.base.checks import check_integer
from stars_fast.models.folders import has_tokenizer
from stars_fast.models.portable import add_code
from stars_fast.models.saved import find_model, load_model


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    turns: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    portable: bool = False,
) -> Path:
    """Write the model of a run as a checkpoint in the layout of its family.

    The folder appears whole or not at all.

    Args:
        run: a run folder, or a checkpoint (local folder or hub id).
        out: new or empty folder.
        step: checkpoint of the run; the newest by default.
        turns: written as those of the model; its own by default.
        dtype: of the weights; that of the configuration by default.
        max_shard_size: of a file of weights.
        portable: with the model's code in one file, so that `from_pretrained` of transformers opens
            it with `trust_remote_code=True` where this package is not installed.

    Returns:
        `out`.

    Raises:
        FileExistsError: `out` holds files.
        TypeError, ValueError: `turns` or `dtype` is of the wrong type or out of range, or
            `portable` for a family without such code.
        stars_fast.base.errors.ConfigError: there is no such run or checkpoint in it.
    """
    if turns is not None:
        check_integer("turns", turns, 1)
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    out = Path(out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"out: expected a new or empty folder, got {out}")
    source = find_model(run, step)
    code = source.family.code
    if portable and code is None:
        raise ValueError(f"portable: expected False for a model of {source.family.title}, got True")
    model = load_model(source)
    beside = source.beside
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as folder:
        writing = Path(folder) / out.name
        source.family.export(
            model, writing, beside=beside, dtype=dtype, turns=turns, shard=max_shard_size
        )
        if portable and code is not None:
            add_code(writing, code, source.family.title)
        if has_tokenizer(beside):
            source.family.tokenizer(beside).save_pretrained(writing)
        if out.exists():
            out.rmdir()
        writing.rename(out)
    return out
