"""Ouro in vLLM, through lm-eval's model of it; the turns are fixed when it is loaded."""

from __future__ import annotations

import gc
from collections import deque
from importlib.util import find_spec
from typing import Any

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.data.chat import MESSAGE_END
from stars_fast.evaluation.recording import Recording
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.models.saved import ModelSource, load_tokenizer

VLLM_BATCH = 256
"""Prompts handed to vLLM at once by default. It makes the batches of its passes itself; but what it
was handed is kept once all of it is done, so all prompts of a task would be too many."""


class VllmModel:
    """A checkpoint, loaded anew for each number of turns.

    Raises:
        ConfigError: vLLM is not installed, a device is asked for, which vLLM chooses itself, or the
            model is a run, whose checkpoints vLLM can't read, or an adapter's folder.
    """

    def __init__(self, source: ModelSource, options: SweepOptions) -> None:
        if source.step is not None:
            raise ConfigError(
                f"--backend vllm reads checkpoints, and {source.path} is a run: write one with "
                "stars-fast export"
            )
        if source.base is not None:
            raise ConfigError(
                f"--backend vllm reads whole models, and {source.path} is an adapter: write one "
                "with stars-fast export"
            )
        if options.device is not None:
            raise ConfigError(
                "--device: expected none with --backend vllm, which takes the first GPU of "
                f"CUDA_VISIBLE_DEVICES, got {options.device}"
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
            self._turns = turns
        return self._model

    def close(self) -> None:
        """Give the memory back."""
        self._model, self._turns = None, None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def vllm_arguments(source: ModelSource, options: SweepOptions, turns: int) -> dict[str, Any]:
    """Arguments of lm-eval's `VLLM`; those that it does not know go on to `vllm.LLM`."""
    return {
        "pretrained": source.path,
        "dtype": options.dtype or "auto",
        "batch_size": options.batch_size or VLLM_BATCH,
        "max_gen_toks": options.cap,
        "hf_overrides": {"total_ut_steps": turns},
    }


def _recording_class() -> type:
    from lm_eval.models.vllm_causallms import VLLM

    import stars_fast.models.ouro  # noqa: F401 (makes the configuration known to transformers)

    class RecordingVLLM(Recording, VLLM):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self._measured: deque[dict[str, Any]] = deque()
            self._ends = (self.tokenizer.eos_token_id, self.tokenizer.get_vocab().get(MESSAGE_END))

        def measured(self, response: str) -> dict[str, Any]:
            """vLLM's own counts."""
            return self._measured.popleft()

        def _model_generate(self, requests: Any, generate: bool = False, **options: Any) -> Any:
            """As lm-eval's; what vLLM says of each generation is noted for the journal."""
            made = super()._model_generate(requests, generate, **options)
            if generate and self.journal is not None:
                self._measured.extend(self._measure(each.outputs[0]) for each in made)
            return made

        def _measure(self, output: Any) -> dict[str, Any]:
            ids = output.token_ids  # with the token that stops it, which doesn't count
            ended = len(ids) > 0 and ids[-1] in self._ends
            return {"tokens": len(ids) - ended, "cut": output.finish_reason == "length"}

    return RecordingVLLM
