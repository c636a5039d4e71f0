"""Models of runs as checkpoints, which other readers take: of Ouro, Hugging Face and vLLM."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from stars_fast.base.checks import check_integer
from stars_fast.base.errors import ConfigError
from stars_fast.models.adapter_folder import write_adapter
from stars_fast.models.families import families, section_of
from stars_fast.models.merge import kept_share, merge
from stars_fast.models.portable import add_code
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
    portable: bool = False,
) -> Path:
    """Write the model of a run as a checkpoint in the layout of its family.

    Adapters are added to the weights in fp32, which are then rounded to `dtype`; a warning says so
    where that takes a tenth of what they add or more.

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
        portable: with the model's code in one file, so that `from_pretrained` of transformers opens
            it with `trust_remote_code=True` where this package is not installed.

    Returns:
        `out`.

    Raises:
        FileExistsError: `out` holds files.
        TypeError, ValueError: `turns`, `dtype` or `adapter` is of the wrong type or out of range,
            or `portable` for a model without such code.
        stars_fast.base.errors.ConfigError: there is no such run or checkpoint in it, or nothing to
            "keep" in it.
    """
    if turns is not None:
        check_integer("turns", turns, 1)
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    if adapter not in get_args(Adapter):
        raise ValueError(f"adapter: expected one of {get_args(Adapter)}, got {adapter!r}")
    out = Path(out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"out: expected a new or empty folder, got {out}")
    source = find_model(run, step)
    code = source.family.code
    if portable and code is None:
        raise ValueError(
            f"portable: expected none for a model of {source.family.title}, got it: there is code "
            f"that opens without this package for {_with_code()} alone"
        )
    whole = {"turns": turns, "dtype": dtype, "portable": portable or None}
    base = None if adapter == "merge" else _base_of(source, whole)
    model = load_model(source, torch.float32 if source.adapted else None)
    if portable and (foreign := source.family.foreign_code(model)) is not None:
        raise ValueError(
            "portable: expected a model of transformers' own parts, whose code is there wherever "
            f"the folder opens, got {foreign}"
        )
    beside, tokenizer = source.beside, tokenizer_place(source)
    on_the_hub = source.step is None and not Path(tokenizer).is_dir()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as folder:
        writing = Path(folder) / out.name
        if base is not None:
            write_adapter(model, writing, base, source.family.causal_lm)
        else:
            _warn_of_rounding(model, dtype)
            source.family.export(
                merge(model), writing, beside=beside, dtype=dtype, turns=turns, shard=max_shard_size
            )
        if portable and code is not None:
            add_code(writing, code)
        if on_the_hub or (Path(tokenizer) / "tokenizer_config.json").exists():
            source.family.tokenizer(tokenizer).save_pretrained(writing)
        if out.exists():
            out.rmdir()
        writing.rename(out)
    return out


def _with_code() -> str:
    """The families with code that opens without this package, in words."""
    return ", ".join(each.title for each in families().values() if each.code is not None)


def _warn_of_rounding(model: Any, dtype: torch.dtype | None) -> None:
    """Warn where merged weights in `dtype`, or the model's own, lose much of the adapters."""
    dtype = dtype or getattr(getattr(model, "config", None), "dtype", None) or torch.float32
    share = kept_share(model, dtype)
    if share < 0.9:
        warnings.warn(
            f"weights in {str(dtype).removeprefix('torch.')} keep {share:.0%} of what the adapters "
            "add; dtype float32 keeps all of it, and so does adapter keep",
            stacklevel=3,
        )


def _base_of(source: ModelSource, whole: dict[str, Any]) -> str:
    """The base model that the adapters of a run are to be written for, folders by their whole path.

    Args:
        whole: options of an export of whole models by name, of which none may be given.

    Raises:
        ConfigError: there are no adapters in it or no base to point to, or an option is of whole
            models.
    """
    option = next((name for name, value in whole.items() if value is not None), None)
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
