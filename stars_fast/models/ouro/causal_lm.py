"""Ouro with its head: a transformers causal language model in which the turns are a knob."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from stars_fast.models.adaptive import Per
from stars_fast.models.call_arguments import kept_states, wants_dict
from stars_fast.models.ouro.cache import CACHE, OuroCache
from stars_fast.models.ouro.config import OuroConfig
from stars_fast.models.ouro.generation import LoopedGenerationMixin
from stars_fast.models.ouro.loading import drop_stale_weights, set_stop
from stars_fast.models.ouro.losses import language_loss
from stars_fast.models.ouro.model import OuroModel, OuroPreTrainedModel


@dataclass
class OuroCausalLMOutput(CausalLMOutputWithPast):
    """Attributes, besides transformers':
    loss: scalar, with `labels`.
    logits: [B, S', V]; S' as `logits_to_keep` says; None where they are skipped.
    hidden_states, turns: as `OuroModelOutput`.
    """

    turns: Tensor | None = None


class OuroForCausalLM(LoopedGenerationMixin, OuroPreTrainedModel):
    """Ouro-1.4B, 2.6B, and what is trained from them.

        model = OuroForCausalLM.from_pretrained("ByteDance/Ouro-1.4B", dtype=torch.bfloat16)
        model.generate(**inputs, turns=8, max_new_tokens=64)

    Loading never runs code of the checkpoint; keys that are missing, not expected or of another
    shape are errors that name them. `turns`, `exit_at_step`, `exit_threshold`, `tol` and `tol_per`
    are arguments of a call and of `generate`, and settings of a `GenerationConfig`; the others'
    defaults are in the configuration.
    """

    depth_settings = ("turns", "exit_at_step", "exit_threshold", "tol", "tol_per")

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        set_stop(self)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write the public layout: safetensors, a config that both current and older readers
        understand, and a generation config that stops where a ChatML turn ends."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if args[0] if args else kwargs.get("is_main_process", True):
            drop_stale_weights(Path(save_directory))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: OuroCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        turns: int | None = None,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        tol: float | None = None,
        tol_per: Per = "sequence",
        cu_seqlens: Tensor | None = None,
        cache: OuroCache | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> OuroCausalLMOutput | tuple[Any, ...]:
        """Logits, and the loss where labels are given.

        Args:
            labels: [B, S] int64, the token ids themselves (they are shifted here), -100 where there
                is no target.
            logits_to_keep: logits of the last so many positions, or of positions [n]; 0 for all.
            num_items_in_batch: divides the summed loss; the number of targets by default.
            skip_logits: compute the loss alone, without a tensor of all logits; by default in
                training, where labels are given.
            turns, exit_at_step, exit_threshold, tol, tol_per, cu_seqlens and the rest: as
                `OuroModel.forward`; `cache` is another name of `past_key_values`.

        Raises:
            TypeError, ValueError: an argument that is unknown, of the wrong type, shape or range.
        """
        return_dict = kwargs.pop("return_dict", None)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            turns=turns,
            exit_at_step=exit_at_step,
            exit_threshold=exit_threshold,
            tol=tol,
            tol_per=tol_per,
            cu_seqlens=cu_seqlens,
            cache=cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        h = outputs.last_hidden_state
        loss = None
        if labels is not None:
            loss = language_loss(self.lm_head, outputs, labels, num_items_in_batch)
        if skip_logits is None:
            skip_logits = labels is not None and self.training
        held: dict[str, Any] = {CACHE: outputs.get(CACHE)}
        output = OuroCausalLMOutput(
            loss=loss,
            logits=None if skip_logits else self.lm_head(kept_states(h, logits_to_keep)),
            hidden_states=outputs.hidden_states if output_hidden_states else None,
            turns=outputs.turns,
            **held,
        )
        return output if wants_dict(self.config, return_dict) else output.to_tuple()

    def empty_cache(self) -> OuroCache:
        return OuroCache(self.config.num_hidden_layers)
