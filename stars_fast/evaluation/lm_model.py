"""Ouro and looped decoders as models of lm-eval (EleutherAI's evaluation harness), with their
turns as an argument.

Importing this module registers it as `stars_fast`:

    import stars_fast.evaluation.lm_model
    lm_eval.simple_evaluate("stars_fast", "pretrained=ByteDance/Ouro-1.4B,turns=8", tasks=["gsm8k"])
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, get_args

import torch

from stars_fast.base.optional import need

need("lm_eval", "evaluations with lm-eval")  # before the imports below, which would not say how

from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import StoppingCriteria, StoppingCriteriaList  # noqa: E402

from stars_fast.base.tree import ConfigError  # noqa: E402
from stars_fast.data.chat import MESSAGE_END  # noqa: E402
from stars_fast.evaluation.recording import Recording  # noqa: E402
from stars_fast.models.adaptive import Per  # noqa: E402
from stars_fast.models.folders import check_exists, check_folder  # noqa: E402
from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM  # noqa: E402
from stars_fast.models.ouro import OuroForCausalLM, count_turns  # noqa: E402
from stars_fast.models.ouro.generation import adopt_depth  # noqa: E402
from stars_fast.models.ouro.turn_count import TurnCount  # noqa: E402

CLASSES: dict[str, Any] = {"ouro": OuroForCausalLM, "looped_decoder": LoopedDecoderForCausalLM}
"""Models that are understood, by `model_type`."""


@register_model("stars_fast")
class StarsFastLM(Recording, HFLM):
    """lm-eval's `HFLM` for Ouro and looped decoders.

    Generation ends at the end of a chat message as well as of the text, and each row of a batch by
    itself at the task's own stops.

    Args:
        pretrained: hub id or folder of a checkpoint, or an `OuroForCausalLM` or
            `LoopedDecoderForCausalLM`.
        turns: of the shared block; those of the checkpoint by default.
        tol: what changes by at most this in a turn, relative, takes no further turn; 0 for no such
            stop, by default the checkpoint's.
        tol_per: what rests by itself, "sequence" or "token" (`models.adaptive`).
        others: as `HFLM`'s: dtype, device, batch_size, max_length, ...

    Raises:
        TypeError, ValueError: there is no such folder, the checkpoint is not whole or of no
            known model, or an argument is out of range.
    """

    AUTO_MODEL_CLASS: Any = OuroForCausalLM
    batch_size_per_gpu: int | str

    def __init__(
        self,
        pretrained: Any,
        turns: int | None = None,
        tol: float | None = None,
        tol_per: Per = "sequence",
        **others: Any,
    ) -> None:
        if not isinstance(pretrained, (str, *CLASSES.values())):
            raise TypeError(
                "pretrained: expected a hub id, a folder, an OuroForCausalLM or a "
                f"LoopedDecoderForCausalLM, got {type(pretrained).__name__}"
            )
        if isinstance(pretrained, str):
            check_exists(pretrained)
            if not (Path(pretrained) / "config.json").exists():  # else it is checked when loaded
                check_folder(pretrained, tuple(CLASSES))
        if tol_per not in get_args(Per):
            raise ValueError(f"tol_per: expected one of {get_args(Per)}, got {tol_per!r}")
        super().__init__(pretrained, backend="causal", **others)
        self.tol_per = tol_per
        adopt_depth(self.model)  # what is scored is as deep as what is generated
        set_turns(self.model.config, turns, tol)
        known = self.tokenizer.get_vocab().get(MESSAGE_END)
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        wanted = (*ends, self.tokenizer.eos_token_id, known)
        self.end_ids = [i for i in dict.fromkeys(wanted) if i is not None]
        self._measured: deque[dict[str, Any]] = deque()

    def _get_config(self, pretrained: str, **given: Any) -> None:
        super()._get_config(pretrained, **given)
        if self._config.model_type not in CLASSES:
            raise ValueError(
                f"pretrained: expected a checkpoint with model_type {' or '.join(CLASSES)}, got "
                f"{self._config.model_type!r} in {pretrained}; lm-eval's own models take others"
            )
        self.AUTO_MODEL_CLASS = CLASSES[self._config.model_type]

    def share(self, accelerator: Any) -> None:
        """Evaluate together with the other processes of an `accelerate.Accelerator`, each of which
        holds a model of its own. (`HFLM` does so only for models that it loads itself.)"""
        self.accelerator = accelerator
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def measured(self, response: str) -> dict[str, Any]:
        return self._measured.popleft()

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    @torch.no_grad()
    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        """inps [B, S] -> logits [B, S, V]; the others are of models with an encoder."""
        with self._autocast():
            return self.model(inps, tol_per=self.tol_per, use_cache=False).logits

    def _loglikelihood_tokens(self, *args: Any, **options: Any) -> list[tuple[float, bool]]:
        """One by one where a sequence rests by itself: `HFLM` pads a batch on the right and gives
        no mask, so that the padding would hold the shorter sequences up."""
        if not (self.model.config.convergence_tol and self.tol_per == "sequence"):
            return super()._loglikelihood_tokens(*args, **options)
        before, self.batch_size_per_gpu = self.batch_size_per_gpu, 1
        try:
            return super()._loglikelihood_tokens(*args, **options)
        finally:
            self.batch_size_per_gpu = before

    def tok_batch_encode(
        self, strings: list[str], *given: Any, left_truncate_len: int | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """As `HFLM`'s; in a sweep a prompt that would lose its beginning is an error."""
        if self.journal is None:
            options["left_truncate_len"] = left_truncate_len
        ids, mask = super().tok_batch_encode(strings, *given, **options)
        if self.journal is not None and left_truncate_len and ids.shape[1] > left_truncate_len:
            raise ConfigError(
                f"--max-new-tokens must leave room for the prompts: one has {ids.shape[1]} tokens, "
                f"and {left_truncate_len} of the model's {self.max_length} are left for it"
            )
        return ids, mask

    @torch.no_grad()
    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """context [B, S] -> [B, S + generated]."""
        if not options.get("do_sample"):
            options["do_sample"] = False
            options.pop("temperature", None)
        ends = {self.tokenizer.decode([i]) for i in self.end_ids}
        strings = [string for string in stop if string and string not in ends]
        start = context.shape[1]
        criteria = [StopStrings(self.tokenizer, strings, start)] if strings else []
        with self._autocast(), count_turns(self.model) as count:
            tokens = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=StoppingCriteriaList(criteria),
                eos_token_id=self.end_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                tol_per=self.tol_per,
                **options,
            )
        if self.journal is not None:
            self._measure(tokens[:, start:], max_length - start, strings, count)
        return tokens

    def _measure(self, made: Tensor, cap: int, strings: list[str], count: TurnCount) -> None:
        """Note for each row of the new tokens [B, N] what the journal keeps."""
        stops = torch.tensor([*self.end_ids, self.tokenizer.pad_token_id], device=made.device)
        stopped = torch.isin(made, stops)
        lengths = torch.where(stopped.any(1), stopped.int().argmax(1), made.shape[1]).tolist()
        first, *later = count.calls
        real = count.real[0]
        prompt = (first if real is None else first * real).sum(1).tolist()
        read = [first.shape[1]] * len(first) if real is None else real.sum(1).tolist()
        steps = torch.cat([turns[:, -1:] for turns in later], 1).tolist() if later else None
        for row, length in enumerate(lengths):
            cut = length == cap
            if cut and strings:
                text = self.tokenizer.decode(made[row])
                cut = not any(string in text for string in strings)
            # Its last token was not read to write it, though a batch may go on for other rows.
            taken = steps[row][: max(length - 1, 0)] if steps else []
            self._measured.append(
                {
                    "tokens": length,
                    "cut": cut,
                    "turns": prompt[row] + sum(taken),
                    "read": read[row] + len(taken),
                }
            )


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


def set_turns(config: Any, turns: int | None, tol: float | None) -> None:
    """Set how deep the model of a configuration thinks; None leaves what it says.

    Raises:
        TypeError, ValueError: a value out of range.
    """
    config.set_depth(turns, tol)
