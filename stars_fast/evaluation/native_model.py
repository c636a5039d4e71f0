"""A model of transformers, a looped one in a class of this package, loaded once for all of its
turns."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from stars_fast.base.optional import need
from stars_fast.evaluation.kv_memory import KeyValues, key_values
from stars_fast.evaluation.loading import device_for
from stars_fast.evaluation.subjects import Subject, load_subject, tokenizer_of
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.models.standard import StandardModel

NATIVE_BATCH = 16
"""Sequences in a forward pass by default."""


class NativeModel:
    """A causal language model, loaded once, and only if a setting is not done yet."""

    backend = "native"

    def __init__(self, source: Subject, options: SweepOptions) -> None:
        self.source, self.options = source, options
        self.tokenizer = tokenizer_of(source)
        self._model: Any = None

    def at(self, turns: int | None, tol: float) -> Any:
        """As a model of lm-eval, at this depth; None for a model without turns."""
        from stars_fast.evaluation.hf_model import StandardLM
        from stars_fast.evaluation.lm_model import StarsFastLM, set_turns

        if self._model is None:
            dtype = None if self.options.dtype is None else getattr(torch, self.options.dtype)
            accelerator = _accelerator(self.options.device)
            device = str(accelerator.device) if accelerator else device_for(self.options.device)
            model = load_subject(self.source, dtype, device)
            given: dict[str, Any] = {
                "tokenizer": self.tokenizer,
                "batch_size": self.options.batch_size or NATIVE_BATCH,
            }
            if isinstance(self.source, StandardModel):
                self._model = StandardLM(model, **given)
            else:
                self._model = StarsFastLM(model, tol_per=self.options.tol_per, **given)
            if accelerator:
                self._model.share(accelerator)
        if turns is not None:
            set_turns(self._model.config, turns, tol)
        return self._model

    def key_values(self, turns: int | None) -> KeyValues | None:
        """Memory of the cache at the depth that `at` was asked for last."""
        return key_values(self._model.model, self._model.max_length)

    def close(self) -> None:
        """Give the memory back."""
        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _accelerator(device: str | None) -> Any:
    """The accelerator of the processes that torchrun started; None for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    return need("accelerate", "evaluations in several processes").Accelerator(cpu=device == "cpu")
