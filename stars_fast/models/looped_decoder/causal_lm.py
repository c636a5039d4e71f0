"""A looped decoder with its head: a transformers causal language model whose turns are a knob."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from stars_fast.models.adaptive import Per
from stars_fast.models.call_arguments import kept_states, wants_dict
from stars_fast.models.looped_decoder.cache import LoopedDecoderCache
from stars_fast.models.looped_decoder.config import LoopedDecoderConfig
from stars_fast.models.looped_decoder.conversion import check_decoder, check_understood, take_over
from stars_fast.models.looped_decoder.model import (
    LoopedDecoderModel,
    LoopedDecoderPreTrainedModel,
    fresh_decoder,
)
from stars_fast.models.ouro.cache import CACHE
from stars_fast.models.ouro.generation import LoopedGenerationMixin
from stars_fast.models.ouro.losses import language_loss
from stars_fast.models.plain_linear import is_plain_linear


@dataclass
class LoopedDecoderCausalLMOutput(CausalLMOutputWithPast):
    """Attributes, besides transformers':
    loss: scalar, with `labels`.
    logits: [B, S', V]; S' as `logits_to_keep` says; None where they are skipped.
    hidden_states, inputs, turns: as `LoopedDecoderModelOutput`.
    """

    inputs: Tensor | None = None
    turns: Tensor | None = None


class LoopedDecoderForCausalLM(LoopedGenerationMixin, LoopedDecoderPreTrainedModel):
    """A decoder of transformers whose middle layers are repeated.

        llama = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
        model = LoopedDecoderForCausalLM.from_decoder(llama, prelude=4, block=22, coda=4)
        model.generate(**inputs, turns=3, max_new_tokens=64)

    Loading never runs code of the checkpoint; keys that are missing, not expected or of another
    shape are errors that name them. `turns`, `tol` and `tol_per` are arguments of a call and of
    `generate`, and settings of a `GenerationConfig`; the others' defaults are in the configuration.
    """

    accepts_loss_kwargs = True

    def __init__(self, config: LoopedDecoderConfig) -> None:
        super().__init__(config)
        decoder = fresh_decoder(config)
        self.lm_head = decoder.get_output_embeddings()
        self.model = LoopedDecoderModel(config, decoder)
        embedding = self.model.get_input_embeddings()
        name = next(name for name, each in self.named_modules() if each is embedding)
        self._tied_weights_keys = {"lm_head.weight": f"{name}.weight"}
        self.post_init()

    @classmethod
    def from_decoder(
        cls,
        model: Any,
        *,
        prelude: int = 1,
        block: int | None = None,
        coda: int = 1,
        injection: str = "none",
        state: str = "prelude",
        state_std: float = 0.02,
        adapter_start: str | None = None,
        norm_between: bool = False,
        layers: Sequence[int] | None = None,
        turns: int = 4,
    ) -> LoopedDecoderForCausalLM:
        """Loop a decoder.

        The layers are the decoder's own, not copies: training one trains the other. With one turn,
        all layers and no injection the logits are the decoder's; so they are with an adapter, but
        for one that starts as a state which is not the prelude's output, and with
        `injection="add"` on a learned state, which starts as zero.

        Args:
            model: a causal language model of transformers with attention layers.
            prelude, block, coda, injection, state, state_std, adapter_start, norm_between, layers:
                as `LoopedDecoderConfig`.
            turns: where a call names none.

        Raises:
            TypeError: `model` is no such model, or of an architecture that is not understood: put
                together again, its parts give other logits than it does.
            ValueError: a count, a layer or a setting that does not fit, named.
        """
        check_decoder(model)
        config = LoopedDecoderConfig(
            model.config,
            layers=layers,
            prelude=prelude,
            block=block,
            coda=coda,
            injection=injection,
            state=state,
            state_std=state_std,
            adapter_start=adapter_start,
            norm_between=norm_between,
            total_ut_steps=turns,
            use_cache=getattr(model.config, "use_cache", True),
        )
        looped = take_over(cls, config, model)
        check_understood(looped, model)
        if model.generation_config is not None:
            looped.generation_config = copy.deepcopy(model.generation_config)
        return looped.train(model.training)

    def logits(self, h: Tensor) -> Tensor:
        """Logits [B, S, V] from what the coda gives [B, S, D], as the decoder's own head."""
        config = self.config.decoder
        logits = self.lm_head(h)
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (scale := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / scale
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = (logits / cap).tanh() * cap
        return logits

    @property
    def head_is_linear(self) -> bool:
        """Whether logits are the weight of the head times the state, and nothing else."""
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        plain = all(getattr(self.config.decoder, name, None) is None for name in names)
        return plain and is_plain_linear(self.lm_head) and self.lm_head.bias is None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LoopedDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        turns: int | None = None,
        tol: float | None = None,
        tol_per: Per = "sequence",
        cu_seqlens: Tensor | None = None,
        cache: LoopedDecoderCache | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> LoopedDecoderCausalLMOutput | tuple[Any, ...]:
        """Logits, and the loss where labels are given.

        Args:
            labels: [B, S] int64, the token ids themselves (they are shifted here), -100 where there
                is no target.
            logits_to_keep: logits of the last so many positions, or of positions [n]; 0 for all.
            num_items_in_batch: divides the summed loss; the number of targets by default.
            skip_logits: compute the loss alone, without a tensor of all logits; by default in
                training, where labels are given.
            turns, tol, tol_per, cu_seqlens and the rest: as `LoopedDecoderModel.forward`; `cache`
                is another name of `past_key_values`.

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
            tol=tol,
            tol_per=tol_per,
            cu_seqlens=cu_seqlens,
            cache=cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        loss = None
        if labels is not None:
            if getattr(self.config.decoder, "output_router_logits", False):
                raise ValueError(
                    "output_router_logits: expected False with labels, got True: the auxiliary "
                    "loss of a router is not added here"
                )
            head: Any = self.lm_head if self.head_is_linear else self.logits
            loss = language_loss(head, outputs, labels, num_items_in_batch)
        if skip_logits is None:
            skip_logits = labels is not None and self.training
        kept = kept_states(outputs.last_hidden_state, logits_to_keep)
        held: dict[str, Any] = {CACHE: outputs.get(CACHE)}
        output = LoopedDecoderCausalLMOutput(
            loss=loss,
            logits=None if skip_logits else self.logits(kept),
            hidden_states=outputs.hidden_states if output_hidden_states else None,
            inputs=outputs.inputs,
            turns=outputs.turns,
            **held,
        )
        return output if wants_dict(self.config, return_dict) else output.to_tuple()

    def empty_cache(self) -> LoopedDecoderCache:
        return self.model.empty_cache()
