"""Ouro in vLLM, through lm-eval's model of it; the turns are fixed when it is loaded."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from stars_fast.evaluation.loading import ModelSource, load_tokenizer
from stars_fast.evaluation.recording import Recording
from stars_fast.training.tree import ConfigError

if TYPE_CHECKING:
    from stars_fast.evaluation.sweep import SweepOptions


class VllmModel:
    """A checkpoint, loaded anew for each number of turns.

    Raises ConfigError where vLLM is not installed, or the model is a run, whose checkpoints vLLM
    can't read.
    """

    def __init__(self, source: ModelSource, options: SweepOptions) -> None:
        if source.step is not None:
            raise ConfigError(
                f"--backend vllm reads checkpoints, and {source.path} is a run: write one with "
                "stars-fast export"
            )
        if find_spec("vllm") is None:
            raise ConfigError("--backend vllm needs vllm: pip install vllm")
        self.source, self.options = source, options
        self.tokenizer = load_tokenizer(source)
        self._model: Any = None
        self._turns: int | None = None

    def at(self, turns: int, tol: float) -> Any:
        """As a model of lm-eval, at this depth."""
        if turns != self._turns:
            self.close()
            self._model = _recording_class()(**vllm_arguments(self.source, self.options, turns))
            self._model.cap = self.options.cap
            self._turns = turns
        return self._model

    def close(self) -> None:
        """Give the memory back."""
        self._model, self._turns = None, None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def vllm_arguments(source: ModelSource, options: SweepOptions, turns: int) -> dict[str, Any]:
    """Of lm-eval's `VLLM`; what it does not know itself goes on to `vllm.LLM`."""
    return {
        "pretrained": source.path,
        "dtype": options.dtype or "auto",
        "batch_size": "auto",  # vLLM makes its batches itself
        "max_gen_toks": options.cap,
        "hf_overrides": {"total_ut_steps": turns},
    }


def _recording_class() -> type:
    from lm_eval.models.vllm_causallms import VLLM

    import stars_fast.models.ouro  # noqa: F401 (makes the configuration known to transformers)

    class RecordingVLLM(Recording, VLLM):
        cap: int

        def measured(self, response: str) -> dict[str, Any]:
            """vLLM's own counts don't come through lm-eval: the tokens are counted anew."""
            tokens = len(self.tokenizer.encode(response, add_special_tokens=False))
            return {"tokens": tokens, "cut": tokens >= self.cap}

    return RecordingVLLM
