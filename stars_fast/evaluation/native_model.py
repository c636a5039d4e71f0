"""A looped model of transformers in a class of this package, loaded once for all of its turns."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from stars_fast.base.optional import need
from stars_fast.evaluation.loading import device_for
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.models.saved import ModelSource, load_model, load_tokenizer

NATIVE_BATCH = 16
"""Sequences in a forward pass by default."""


class NativeModel:
    """A causal language model of a family, loaded once, and only if a setting is not done yet."""

    def __init__(self, source: ModelSource, options: SweepOptions) -> None:
        self.source, self.options = source, options
        self.tokenizer = load_tokenizer(source)
        self._model: Any = None

    def at(self, turns: int, tol: float) -> Any:
        """As a model of lm-eval, at this depth."""
        from stars_fast.evaluation.lm_model import StarsFastLM, set_turns

        if self._model is None:
            dtype = None if self.options.dtype is None else getattr(torch, self.options.dtype)
            accelerator = _accelerator(self.options.device)
            device = str(accelerator.device) if accelerator else device_for(self.options.device)
            model = load_model(self.source, dtype, device)
            self._model = StarsFastLM(
                model,
                tokenizer=self.tokenizer,
                batch_size=self.options.batch_size or NATIVE_BATCH,
                tol_per=self.options.tol_per,
            )
            if accelerator:
                self._model.share(accelerator)
        set_turns(self._model.config, turns, tol)
        return self._model

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
