"""Ouro without a head: embedding, then turns of the shared block (Zhu et al. 2025, "Scaling Latent
Reasoning via Looped Language Models", https://arxiv.org/abs/2510.25741)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from stars_fast.dual.pass_mode import on_stacks
from stars_fast.dual.tensor import Dual
from stars_fast.models.adaptive import AdaptiveDepth, Per
from stars_fast.models.call_arguments import check_arguments, take_documents, wants_dict
from stars_fast.models.folders import check_folder
from stars_fast.models.ouro.cache import CACHE, OuroCache, given_cache
from stars_fast.models.ouro.config import OuroConfig, check_config, check_gate
from stars_fast.models.ouro.context import Context, make_context, windows_of
from stars_fast.models.ouro.exits import exit_turns, gate_logits, pick_states, turns_and_threshold
from stars_fast.models.ouro.layers import OuroDecoderLayer, OuroRMSNorm, can_chain
from stars_fast.models.ouro.loading import GATE_KEYS, check_loaded, set_stop
from stars_fast.models.ouro.rotary import Rotary
from stars_fast.tokens import Tokens


@dataclass
class OuroModelOutput(BaseModelOutputWithPast):
    """Attributes, besides transformers':
    last_hidden_state: [B, S, D], what the head reads.
    hidden_states: with `output_hidden_states`, (h^(0), ..., h^(T)), each [B, S, D].
    gates: with `output_gates`, [T, B, S] logits of the exit gate after each turn, fp32.
    turns: [B, S] int64, turns executed for each token.
    real: [B, S] boolean, False on pads; None where there are none.
    starts: [B or 1, S] int64, where the packed document of each token starts; None if not packed.
    """

    gates: Tensor | None = None
    turns: Tensor | None = None
    real: Tensor | None = None
    starts: Tensor | None = None


class OuroPreTrainedModel(PreTrainedModel):
    """The base of Ouro's classes in transformers: initial weights, loading, sharding."""

    config_class = OuroConfig
    config: OuroConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OuroDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', and strict.

        Raises:
            ValueError: a folder holds no whole Ouro checkpoint; keys are missing, not expected or
                of another shape; all are named.
        """
        if kwargs.keys().isdisjoint(("subfolder", "variant", "state_dict")):
            check_folder(pretrained_model_name_or_path)
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.pop("trust_remote_code", None)
        kwargs["ignore_mismatched_sizes"] = True  # reported below, with the others
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        model, info = loaded
        may_miss = GATE_KEYS if model.config.gate == "ignored" else None
        check_loaded(str(pretrained_model_name_or_path), model, info, may_miss)
        set_stop(model)
        model.base_model.set_gate(model.config.gate)  # loading makes new parameters
        return (model, info) if wants_info else model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        from transformers import initialization as init

        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, OuroRMSNorm):
            init.ones_(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)


class OuroModel(OuroPreTrainedModel):
    """Tokens to states.

    A turn is all layers and the closing norm; the next turn starts from the normed state.
    """

    takes_turns = True

    def __init__(self, config: OuroConfig) -> None:
        check_config(config)  # again: settings may have been overridden since
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            OuroDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.rotary = Rotary(config)
        self.gradient_checkpointing = False
        self.set_gate(config.gate)
        self.post_init()

    def set_gate(self, gate: str) -> None:
        """Say what becomes of the exit gate: "frozen" or "ignored" (`OuroConfig.gate`).

        Its parameters want no gradient: DistributedDataParallel needs no `find_unused_parameters`.
        """
        check_gate(gate)
        self.config.gate = gate
        self.early_exit_gate.requires_grad_(False)

    def prepare(
        self,
        h: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: OuroCache | None = None,
        tokens: Tokens | None = None,
    ) -> Context:
        """The context of one call's turns; arguments and errors as `context.make_context`."""
        return make_context(
            windows_of(self.config),
            self.rotary,
            h,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            cache=cache,
            tokens=tokens,
        )

    def turn(self, h: Tensor, context: Context, index: int = 0) -> Tensor:
        """One turn, h [B, S, D] -> [B, S, D]; a `Dual` gives a `Dual`.

        Args:
            context: from `prepare`.
            index: of the turn; it matters for the cache alone.
        """
        if not isinstance(h, Dual):
            return self._layers(h, context, index)
        with on_stacks():
            # A pair of this region: the one from outside would stand for its primal here.
            return self._layers(Dual(h.stack), context, index)

    def _layers(self, h: Tensor, context: Context, index: int) -> Tensor:
        recompute = self._recomputes()
        if can_chain(self.layers, self.norm, h.device):
            return self._chain(h, context, index, recompute)
        for layer in self.layers:
            if recompute:
                h = self._gradient_checkpointing_func(layer, h, context, index)
            else:
                h = layer(h, context, index)
        return self.norm(h)

    def _chain(self, h: Tensor, context: Context, index: int, recompute: bool) -> Tensor:
        """`_layers` with each norm that closes a layer and the next norm as one op."""
        layers: list[Any] = list(self.layers)
        x = layers[0].input_layernorm(h)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            norm = self.norm if following is None else following.input_layernorm
            if recompute:
                run = self._gradient_checkpointing_func
                h, x = run(layer.chained, h, x, norm, context, index)
            else:
                h, x = layer.chained(h, x, norm, context, index)
        return x

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: OuroCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        turns: int | None = None,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        tol: float | None = None,
        tol_per: Per = "sequence",
        cu_seqlens: Tensor | None = None,
        cache: OuroCache | None = None,
        output_hidden_states: bool | None = None,
        output_gates: bool = False,
        **kwargs: Any,
    ) -> OuroModelOutput | tuple[Any, ...]:
        """Run the turns.

        Args:
            input_ids: [B, S] int64; or inputs_embeds: [B, S, D].
            attention_mask: [B, past + S], 1 on real tokens.
            position_ids: [B or 1, S]; by default they count the real tokens.
            past_key_values: an `OuroCache`, filled by calls of as many turns; also by the name
                `cache`.
            use_cache: return one where none is given; by default `config.use_cache` outside
                training, and not for packed documents.
            turns: how many; by default `config.total_ut_steps`. What a call says of the turns
                comes before the exits of the configuration.
            exit_at_step: the turn, counted from 0, whose state is returned, as published. No later
                turn is run.
            exit_threshold: each token takes the state of the first turn at which its probability
                of having left reaches this. All turns are run, as published: later tokens attend to
                keys of every turn.
            tol: a sequence all of whose (new) tokens changed by at most this, relative, in a turn
                takes no further turn; its keys and values stand in for those of the turns left
                out. 0 for no such stop.
            tol_per: "sequence", or "token": a token that rests keeps its state while others of its
                sequence go on (`models.adaptive`).
            cu_seqlens: [n + 1] bounds of documents packed in a batch of one row; also as
                `cu_seq_lens_q` and the names beside it (`call_arguments.take_documents`).
            output_hidden_states: return the states before and after each turn.
            output_gates: return the gate's logits after each turn.

        Raises:
            TypeError, ValueError: an argument of the wrong type, shape or range, named.
        """
        config = self.config
        position_ids, cu_seqlens = take_documents(kwargs, position_ids, cu_seqlens)
        check_arguments(kwargs, config, "Ouro")
        h = self._embedded(input_ids, inputs_embeds)
        limit, threshold = turns_and_threshold(config, turns, exit_at_step, exit_threshold)
        tol = config.convergence_tol if tol is None else tol
        depth = AdaptiveDepth(h, limit, tol, tol_per)
        given = given_cache(past_key_values, cache, OuroCache)
        cache = self._cache(given, use_cache, limit, len(h))
        context = self.prepare(h, attention_mask, position_ids, cu_seqlens, cache)
        if context.starts is not None and cache is not None:
            if given is not None or use_cache:
                raise ValueError("use_cache: expected False for packed documents, got a cache")
            cache, context = None, replace(context, cache=None)
        needs_gate = threshold is not None or output_gates
        if needs_gate and config.gate == "ignored":
            raise ValueError("exit_threshold: expected None with gate='ignored', which has no exit")
        keep = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states, gates = [h], []
        part, rows = context, depth.rows
        while depth.goes_on:
            h = depth.step(h, self.turn(depth.of(h), part, depth.taken), context.real)
            if keep or threshold is not None:
                states.append(h)
            if needs_gate:
                gates.append(gate_logits(self.early_exit_gate, h))
            if depth.rows is not None and depth.rows is not rows:
                rows = depth.rows
                part = context.take_rows(rows)
        if cache is not None and depth.taken < limit:
            cache.repeat_from(depth.taken, h.shape[1])
        out = h
        stacked = torch.stack(gates) if gates else None
        if threshold is not None and stacked is not None:
            out = pick_states(states[1:], exit_turns(stacked, threshold))
        held: dict[str, Any] = {CACHE: cache}
        output = OuroModelOutput(
            last_hidden_state=out,
            hidden_states=tuple(states) if keep else None,
            gates=stacked if output_gates else None,
            turns=depth.turns,
            real=context.real,
            starts=context.starts,
            **held,
        )
        return output if wants_dict(config, kwargs.get("return_dict")) else output.to_tuple()

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """h^(0), [B, S, D]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either input_ids or inputs_embeds")
        width = self.config.hidden_size
        if inputs_embeds is not None:
            if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != width:
                raise ValueError(
                    f"inputs_embeds: expected [B, S, {width}], got {list(inputs_embeds.shape)}"
                )
            return inputs_embeds
        assert input_ids is not None
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "input_ids: expected integers [B, S], "
                f"got {input_ids.dtype} {list(input_ids.shape)}"
            )
        if not input_ids.numel():
            raise ValueError(f"input_ids: expected a token at least, got {list(input_ids.shape)}")
        return self.embed_tokens(input_ids)

    def _cache(self, given: Any, use_cache: bool | None, turns: int, batch: int) -> Any:
        """The cache of a call: the one given, a new one, or None."""
        if self._recomputes() and (given is not None or use_cache):
            raise ValueError(
                "use_cache: expected no cache with gradient checkpointing, which computes the keys "
                "a second time"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if given is None and not use_cache:
            return None
        cache = OuroCache(self.config.num_hidden_layers) if given is None else given
        cache.bind(self.config.num_hidden_layers, turns, batch)
        return cache

    def _recomputes(self) -> bool:
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()
