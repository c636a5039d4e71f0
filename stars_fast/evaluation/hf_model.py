"""Causal language models of transformers as models of lm-eval (EleutherAI's evaluation harness)."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from typing import Any

import torch

from stars_fast.base.optional import need

need("lm_eval", "evaluations with lm-eval")  # before the imports below, which would not say how

from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from stars_fast.data.chat import MESSAGE_END
from stars_fast.evaluation.recording import Key, Recording, check_room, keys_of
from stars_fast.evaluation.sampling import GumbelNoise

_PLAIN = {"num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
"""Greedy or drawn from the model's own probabilities, whatever a checkpoint's generation settings
say: as lm-eval's vLLM generates."""


class StandardLM(Recording, HFLM):
    """lm-eval's `HFLM` for what is no looped model, generating as those do here.

    Generation ends at the end of a chat message as well as of the text, and each row of a batch by
    itself at the task's own stops. Likelihoods are computed in fp32 at least: `HFLM` has those of a
    model in 16 bits, and their sums, in 16 bits, where answers that differ come out even.

    Args:
        pretrained: hub id or folder of a checkpoint, or a causal language model of transformers.
        others: as `HFLM`'s: tokenizer, dtype, device, batch_size, max_length, softmax_dtype, ...
    """

    AUTO_MODEL_CLASS: Any = AutoModelForCausalLM
    batch_size_per_gpu: int | str
    softmax_dtype: torch.dtype | None

    def __init__(self, pretrained: Any, **others: Any) -> None:
        super().__init__(pretrained, backend="causal", **others)
        if self.softmax_dtype is None:
            self.softmax_dtype = torch.promote_types(self.model.dtype, torch.float32)
        known = self.tokenizer.get_vocab().get(MESSAGE_END)
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        wanted = (*ends, self.tokenizer.eos_token_id, known)
        self.end_ids = [i for i in dict.fromkeys(wanted) if i is not None]
        self._measured: deque[dict[str, Any]] = deque()
        self._keys: list[Key | None] = []

    def share(self, accelerator: Any) -> None:
        """Evaluate together with the other processes of an `accelerate.Accelerator`, each of which
        holds a model of its own. (`HFLM` does so only for models that it loads itself.)"""
        self.accelerator = accelerator
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def measured(self, response: str) -> dict[str, Any]:
        return self._measured.popleft()

    def _loglikelihood_tokens(self, *args: Any, **options: Any) -> list[tuple[float, bool]]:
        """As `HFLM`'s, with a warning where they are no numbers."""
        found = super()._loglikelihood_tokens(*args, **options)
        if lost := sum(math.isnan(value) for value, _ in found):
            warnings.warn(
                f"{lost} of {len(found)} log-likelihoods are NaN, as states that overflow give: "
                "lm-eval takes the first of some answers to be the likeliest there",
                RuntimeWarning,
                stacklevel=2,
            )
        return found

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def tok_batch_encode(
        self, strings: list[str], *given: Any, left_truncate_len: int | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """As `HFLM`'s; in a sweep a prompt that would lose its beginning is an error."""
        if self.journal is None:
            options["left_truncate_len"] = left_truncate_len
        self._keys = keys_of(strings)
        ids, mask = super().tok_batch_encode(strings, *given, **options)
        if self.journal is not None and left_truncate_len:
            check_room(ids.shape[1], left_truncate_len, self.max_length)
        return ids, mask

    @torch.no_grad()
    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """context [B, S] -> [B, S + generated]."""
        noise = self._noise(context.device)
        if noise or not options.get("do_sample"):
            options["do_sample"] = False
            options.pop("temperature", None)
        ends = {self.tokenizer.decode([i]) for i in self.end_ids}
        strings = [string for string in stop if string and string not in ends]
        start = context.shape[1]
        if self.journal is not None:
            options = _PLAIN | options
        criteria = [StopStrings(self.tokenizer, strings, start)] if strings else []
        begun = time.perf_counter()
        with self._autocast():
            tokens = self._generate(
                input_ids=context,
                max_new_tokens=max_length - start,  # before that of the generation settings
                logits_processor=LogitsProcessorList(noise),
                stopping_criteria=StoppingCriteriaList(criteria),
                eos_token_id=self.end_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                **options,
            )
        if self.journal is not None:
            self._measure(tokens[:, start:], max_length - start, strings, begun)
        return tokens

    def _noise(self, device: torch.device) -> list[GumbelNoise]:
        """The sampling of the batch, where the setting samples."""
        if self.sampling is None:
            return []
        seeds = [key.seed for key in self._keys if key is not None]
        return [GumbelNoise(seeds, self.sampling.temperature, device)]

    def _generate(self, **options: Any) -> Tensor:
        """`generate` of the model."""
        return self.model.generate(**options)

    def _depth(self, row: int, length: int) -> dict[str, Any]:
        """Measurements of the depth of a row of the batch, whose response has `length` tokens."""
        return {}

    def _measure(self, made: Tensor, cap: int, strings: list[str], begun: float) -> None:
        """Note for each row of the new tokens [B, N] what the journal keeps."""
        stops = torch.tensor([*self.end_ids, self.tokenizer.pad_token_id], device=made.device)
        stopped = torch.isin(made, stops)
        lengths = torch.where(stopped.any(1), stopped.int().argmax(1), made.shape[1]).tolist()
        seconds = (time.perf_counter() - begun) / len(lengths)
        for row, length in enumerate(lengths):
            cut = length == cap
            if cut and strings:
                text = self.tokenizer.decode(made[row])
                cut = not any(string in text for string in strings)
            measured = {"tokens": length, "cut": cut, "seconds": seconds}
            self._measured.append(measured | self._depth(row, length))


class StopStrings(StoppingCriteria):
    """Ends each row of a batch at the first of some strings in what it generated.

    lm-eval's own ends the batch once a single string ended all rows. transformers'
    `StopStringCriteria` also finds strings that begin in the prompt, where lm-eval does not, and in
    its version 5.5.0 misses strings with letters beyond ASCII, or fails on them.

    Args:
        tokenizer: of transformers.
        strings: none of them empty.
        start: tokens of the prompt, in which nothing is looked for.
    """

    def __init__(self, tokenizer: Any, strings: list[str], start: int) -> None:
        self.tokenizer, self.strings, self.start = tokenizer, strings, start
        # A string may be written in other tokens than the tokenizer's, of a byte each at least.
        self.reach = max(len(string.encode()) for string in strings)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """[B] boolean."""
        ends = self.tokenizer.batch_decode(input_ids[:, self.start :][:, -self.reach :])
        found = [any(string in end for string in self.strings) for end in ends]
        return torch.tensor(found, device=input_ids.device)
