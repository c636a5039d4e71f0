"""Looped models as models of lm-eval (EleutherAI's evaluation harness), with their turns as an
argument.

Importing this module registers it as `stars_fast`:

    import stars_fast.evaluation.lm_model
    lm_eval.simple_evaluate("stars_fast", "pretrained=ByteDance/Ouro-1.4B,turns=8", tasks=["gsm8k"])
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import torch

from stars_fast.base.optional import need

need("lm_eval", "evaluations with lm-eval")  # before the imports below, which would not say how

from lm_eval.api.registry import register_model
from torch import Tensor

from stars_fast.base.errors import ConfigError
from stars_fast.evaluation.answer_cache import identity_of, own_table
from stars_fast.evaluation.hf_model import StandardLM
from stars_fast.models.adaptive import Per
from stars_fast.models.folders import check_exists, check_folder
from stars_fast.models.huginn import HuginnForCausalLM
from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM
from stars_fast.models.ouro import OuroForCausalLM, count_turns
from stars_fast.models.ouro.generation import adopt_depth
from stars_fast.models.reading import reading

CLASSES: dict[str, Any] = {
    "ouro": OuroForCausalLM,
    "huginn_raven": HuginnForCausalLM,
    "looped_decoder": LoopedDecoderForCausalLM,
}
"""Models that are understood, by `model_type`."""


_OWN = ("turns", "tol", "tol_per")
"""Arguments that lm-eval's own models have not."""


@register_model("stars_fast")
class StarsFastLM(StandardLM):
    """lm-eval's `HFLM` for Ouro, Huginn and looped decoders.

    Generation ends at the end of a chat message as well as of the text, and each row of a batch by
    itself at the task's own stops. lm-eval's cache of answers (`use_cache`) keeps those of other
    weights, turns and tolerances apart.

    Args:
        pretrained: hub id or folder of a checkpoint, or an `OuroForCausalLM`, `HuginnForCausalLM`
            or `LoopedDecoderForCausalLM`.
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

    def __init__(
        self,
        pretrained: Any = None,
        turns: int | None = None,
        tol: float | None = None,
        tol_per: Per = "sequence",
        **others: Any,
    ) -> None:
        if not isinstance(pretrained, (str, *CLASSES.values())):
            names = ", ".join(each.__name__ for each in CLASSES.values())
            raise TypeError(
                f"pretrained: expected a hub id, a folder, or one of {names}, got "
                f"{type(pretrained).__name__}"
            )
        if isinstance(pretrained, str):
            check_exists(pretrained)
            if not (Path(pretrained) / "config.json").exists():  # else it is checked when loaded
                check_folder(pretrained, tuple(CLASSES))
        if tol_per not in get_args(Per):
            raise ValueError(f"tol_per: expected one of {get_args(Per)}, got {tol_per!r}")
        _check_names(others)
        with reading(pretrained) if isinstance(pretrained, str) else nullcontext():
            super().__init__(pretrained, **others)
        self.tol_per = tol_per
        self._given = others | {"softmax_dtype": self.softmax_dtype}
        try:
            adopt_depth(self.model)  # what is scored is as deep as what is generated
            set_turns(self.model.config, turns, tol)
        except ValueError as error:
            raise ConfigError(f"turns, tol: {error}") from error

    def _get_config(self, pretrained: str, **given: Any) -> None:
        super()._get_config(pretrained, **given)
        if self._config.model_type not in CLASSES:
            raise ValueError(
                f"pretrained: expected a checkpoint with model_type {' or '.join(CLASSES)}, got "
                f"{self._config.model_type!r} in {pretrained}; lm-eval's own models take others"
            )
        self.AUTO_MODEL_CLASS = CLASSES[self._config.model_type]

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's cache of answers, of which this model at this depth has a part of its
        own."""
        identity = identity_of(self.model, self.tokenizer, self.tol_per, self._given)
        own_table(cache_hook.dbdict, identity)
        super().set_cache_hook(cache_hook)

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

    def _generate(self, **options: Any) -> Tensor:
        with count_turns(self.model) as self._count:
            return super()._generate(tol_per=self.tol_per, **options)

    def _measure(self, made: Tensor, cap: int, strings: list[str], begun: float) -> None:
        first, *later = self._count.calls
        real = self._count.real[0]
        self._of_prompt = (first if real is None else first * real).sum(1).tolist()
        self._read = [first.shape[1]] * len(first) if real is None else real.sum(1).tolist()
        self._steps = torch.cat([turns[:, -1:] for turns in later], 1).tolist() if later else None
        super()._measure(made, cap, strings, begun)

    def _depth(self, row: int, length: int) -> dict[str, Any]:
        # Its last token was not read to write it, though a batch may go on for other rows.
        taken = self._steps[row][: max(length - 1, 0)] if self._steps else []
        return {
            "turns": self._of_prompt[row] + sum(taken),
            "read": self._read[row] + len(taken),
        }


def set_turns(config: Any, turns: int | None, tol: float | None) -> None:
    """Set how deep the model of a configuration thinks; None leaves what it says.

    Raises:
        TypeError, ValueError: a value out of range.
    """
    config.set_depth(turns, tol)


def _check_names(given: Iterable[str]) -> None:
    """Refuse a name that is nearly one of our own, which transformers might take for its own.

    Raises:
        ConfigError: it names both.
    """
    for name in given:
        if near := difflib.get_close_matches(name, _OWN, n=1, cutoff=0.8):
            raise ConfigError(f"model_args: unknown argument {name}; did you mean {near[0]}?")
