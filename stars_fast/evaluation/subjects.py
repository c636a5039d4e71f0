"""Models that are judged: looped ones, at each number of turns, and standard ones beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.models.saved import ModelSource, find_model, load_model, load_tokenizer
from stars_fast.models.standard import StandardModel, find_standard

Subject = ModelSource | StandardModel


def find_subject(path: str, step: int | None, option: str) -> Subject:
    """The model at `path`; a looped one of the newest checkpoint of a run, or of that of `step`.

    Raises:
        ConfigError: it names `option`: there is none, or no causal language model.
    """
    run, here = RunFolder(path), Path(path).expanduser()
    is_run = run.config.exists() or (run.model / "config.json").exists()
    names = ("config.json", "adapter_config.json")
    if not is_run and (not here.is_dir() or any((here / name).exists() for name in names)):
        standard = find_standard(path)
        if standard is not None:
            if step is not None:
                raise ConfigError(f"--step: expected none for {path}, which is no run, got {step}")
            return standard
    return find_model(path, step).need_causal_lm(option)


def load_subject(subject: Subject, dtype: torch.dtype | None, device: str) -> Any:
    """The model in evaluation mode, in `dtype` (its own by default).

    Raises:
        ConfigError: it can't be loaded.
    """
    if isinstance(subject, StandardModel):
        return subject.load(dtype, device)
    return load_model(subject, dtype, device)


def tokenizer_of(subject: Subject) -> Any:
    """The tokenizer of a model, of transformers.

    Raises:
        ConfigError: it has none.
    """
    if isinstance(subject, StandardModel):
        return subject.tokenizer()
    return load_tokenizer(subject)
