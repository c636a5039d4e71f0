"""Huginn with its head: a transformers causal language model in which the turns are a knob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from stars_fast.base.checks import check_integer
from stars_fast.models.adaptive import AdaptiveDepth, Per
from stars_fast.models.call_arguments import (
    check_arguments,
    kept_states,
    take_documents,
    wants_dict,
)
from stars_fast.models.huginn.cache import HuginnCache
from stars_fast.models.huginn.config import HuginnConfig
from stars_fast.models.huginn.loading import TABLE, rotary_table
from stars_fast.models.huginn.model import HuginnParts
from stars_fast.models.ouro.cache import CACHE, given_cache
from stars_fast.models.ouro.context import Context
from stars_fast.models.ouro.generation import LoopedGenerationMixin
from stars_fast.models.ouro.loading import drop_stale_weights
from stars_fast.models.ouro.losses import language_loss


@dataclass
class HuginnCausalLMOutput(CausalLMOutputWithPast):
    """Attributes, besides transformers':
    loss: scalar, with `labels`.
    logits: [B, S', V]; S' as `logits_to_keep` says; None where they are skipped.
    hidden_states: with `output_hidden_states`, (s_0, ..., s_T), each [B, S, D].
    last_hidden_state: [B, S, D], what the head reads.
    inputs: [B, S, D], the prelude's output, which every turn takes in.
    turns: [B, S] int64, turns executed for each token.
    real: [B, S] boolean, True on real tokens; None where all are.
    """

    last_hidden_state: Tensor | None = None
    inputs: Tensor | None = None
    turns: Tensor | None = None
    real: Tensor | None = None


@dataclass
class _Read:
    """The part of a call that the loss reads."""

    last_hidden_state: Tensor
    real: Tensor | None
    starts: Tensor | None


class HuginnForCausalLM(LoopedGenerationMixin, HuginnParts):
    """Huginn-0125, decoders retrofitted with recurrence, and what is trained from them.

        model = HuginnForCausalLM.from_pretrained("tomg-group-umd/huginn-0125")
        model.generate(**inputs, turns=32, max_new_tokens=64)

    Loading never runs code of the checkpoint; keys that are missing, not expected or of another
    shape are errors that name them. `turns` (or `num_steps`), `tol` and `tol_per` are arguments of
    a call and of `generate`, and settings of a `GenerationConfig`; the others' defaults are in the
    configuration. Outside training the initial state is the same in every
    call (`first_state`).
    """

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True
    takes_turns = True
    depth_settings = ("turns", "num_steps", "tol", "tol_per")

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'; the rows of the embedding are `padded_vocab_size` in the public
        format."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.padded_vocab_size = embeddings.num_embeddings
        return embeddings

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write the public layout: safetensors, with Huginn's rotary table among them, and a
        config that public readers understand."""
        if self.config.layer_layout in (None, "huginn"):
            state = kwargs.get("state_dict")
            state = self.state_dict() if state is None else dict(state)
            state.setdefault(TABLE, rotary_table(self.config, self.rotary))
            kwargs["state_dict"] = state
        super().save_pretrained(save_directory, *args, **kwargs)
        if args[0] if args else kwargs.get("is_main_process", True):
            drop_stale_weights(Path(save_directory))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HuginnCache | None = None,
        inputs_embeds: Tensor | None = None,
        input_states: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        turns: int | None = None,
        num_steps: int | Sequence[int] | Tensor | None = None,
        backprop_turns: int | None = None,
        tol: float | None = None,
        tol_per: Per = "sequence",
        cu_seqlens: Tensor | None = None,
        cache: HuginnCache | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> HuginnCausalLMOutput | tuple[Any, ...]:
        """Logits, and the loss where labels are given.

        Args:
            input_ids: [B, S] int64; or inputs_embeds: [B, S, D], to be scaled by `embed_scale`.
            attention_mask: [B, past + S], 1 on real tokens.
            position_ids: [B or 1, S]; by default they count the real tokens.
            past_key_values: a `HuginnCache`, filled by calls of as many turns; also by the name
                `cache`.
            input_states: [B, S, D], s_0; that of `first_state` by default.
            labels: [B, S] int64, the token ids themselves (they are shifted here), -100 where there
                is no target.
            use_cache: return one where none is given; by default `config.use_cache` outside
                training, and not for packed documents.
            logits_to_keep: logits of the last so many positions, or of positions [n]; 0 for all.
            turns: how many; by default `config.mean_recurrence`.
            num_steps: the same by the public name, or two numbers as there: turns without a
                gradient, and turns with one.
            backprop_turns: gradient through the last so many turns only; None for all.
            tol: a sequence all of whose (new) tokens changed by at most this, relative, in a turn
                takes no further turn; its keys and values stand in for those of the turns left
                out. 0 for no such stop.
            tol_per: "sequence", or "token" (`models.adaptive`).
            cu_seqlens: [n + 1] bounds of documents packed in a batch of one row; also as
                `cu_seq_lens_q` and the names beside it (`call_arguments.take_documents`).
            output_hidden_states: return the states before and after each turn.
            num_items_in_batch: divides the summed loss; the number of targets by default.
            skip_logits: compute the loss alone, without a tensor of all logits; by default in
                training, where labels are given.

        Raises:
            TypeError, ValueError: an argument that is unknown, of the wrong type, shape or range.
        """
        config = self.config
        position_ids, cu_seqlens = take_documents(kwargs, position_ids, cu_seqlens)
        check_arguments(kwargs, config, "Huginn")
        limit, kept = _turns(config, turns, num_steps, backprop_turns)
        x = self._embedded(input_ids, inputs_embeds)
        given = given_cache(past_key_values, cache, HuginnCache)
        cache = self._cache(given, use_cache, limit, len(x))
        context = self.prepare(x, attention_mask, position_ids, cu_seqlens, cache)
        if context.starts is not None and cache is not None:
            if given is not None or use_cache:
                raise ValueError("use_cache: expected False for packed documents, got a cache")
            cache, context = None, replace(context, cache=None)
        e = self.prelude(x, context)
        h = self.first_state(e, context) if input_states is None else input_states
        if h.shape != e.shape:
            raise ValueError(f"input_states: expected {list(e.shape)}, got {list(h.shape)}")
        tol = config.convergence_tol if tol is None else tol
        if torch.is_grad_enabled() and kept < limit and tol:
            raise ValueError(
                f"backprop_turns: expected all {limit} turns with tol={tol}, got {kept}: the last "
                "turn of a row that rests early is not known before"
            )
        depth = AdaptiveDepth(h, limit, tol, tol_per)
        keep = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [h]
        part, rows = context, depth.rows
        while depth.goes_on:
            carries = torch.is_grad_enabled() and depth.taken >= limit - kept
            with torch.set_grad_enabled(carries):
                after = self.turn(depth.of(h), depth.of(e), part, depth.taken)
                h = depth.step(h, after, context.real)
            if keep:
                states.append(h)
            if depth.rows is not None and depth.rows is not rows:
                rows = depth.rows
                part = context.take_rows(rows)
        if cache is not None and depth.taken < limit:
            cache.repeat_from(depth.taken, h.shape[1])
        out = self.coda(h, context)
        loss = None
        if labels is not None:
            read = _Read(out, context.real, context.starts)
            loss = language_loss(self.lm_head, read, labels, num_items_in_batch)
        if skip_logits is None:
            skip_logits = labels is not None and self.training
        held: dict[str, Any] = {CACHE: cache}
        output = HuginnCausalLMOutput(
            loss=loss,
            logits=None if skip_logits else self.lm_head(kept_states(out, logits_to_keep)),
            hidden_states=tuple(states) if keep else None,
            last_hidden_state=out,
            inputs=e,
            turns=depth.turns,
            real=context.real,
            **held,
        )
        return output if wants_dict(config, return_dict) else output.to_tuple()

    def read(self, h: Tensor, context: Context) -> Tensor:
        """Logits [B, S, V] of the state h [B, S, D] after a turn."""
        return self.lm_head(self.coda(h, context))

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either input_ids or inputs_embeds")
        width = self.config.n_embd
        if inputs_embeds is not None:
            if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != width:
                raise ValueError(
                    f"inputs_embeds: expected [B, S, {width}], got {list(inputs_embeds.shape)}"
                )
            return inputs_embeds * self.config.init_values["embed_scale"]
        assert input_ids is not None
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "input_ids: expected integers [B, S], "
                f"got {input_ids.dtype} {list(input_ids.shape)}"
            )
        if not input_ids.numel():
            raise ValueError(f"input_ids: expected a token at least, got {list(input_ids.shape)}")
        return self.embed(input_ids)

    def _cache(self, given: Any, use_cache: bool | None, turns: int, batch: int) -> Any:
        """The cache of a call: the one given, a new one, or None."""
        if self.recomputes and (given is not None or use_cache):
            raise ValueError(
                "use_cache: expected no cache with gradient checkpointing, which computes the keys "
                "a second time"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if given is None and not use_cache:
            return None
        cache = self.empty_cache() if given is None else given
        config = self.config
        outside = config.n_layers_in_prelude
        cache.bind(config.n_layers_in_recurrent_block, turns, batch, outside)
        return cache

    def empty_cache(self) -> HuginnCache:
        config = self.config
        return HuginnCache(config.n_layers_in_prelude, config.n_layers_in_recurrent_block)


def _turns(
    config: HuginnConfig, turns: int | None, num_steps: Any, backprop_turns: int | None
) -> tuple[int, int]:
    """How many turns a call executes at most, and how many of the last carry a gradient."""
    if num_steps is not None:
        if turns is not None:
            raise ValueError("num_steps: expected None when turns is given, got both")
        steps: Any = num_steps.tolist() if isinstance(num_steps, Tensor) else num_steps
        if isinstance(steps, Sequence):
            if len(steps) != 2 or backprop_turns is not None:
                raise ValueError(
                    "num_steps: expected a number, or two (without and with gradient) and no "
                    f"backprop_turns, got {num_steps!r}"
                )
            for number in steps:
                check_integer("num_steps", number, 0)
            steps, backprop_turns = sum(steps), max(steps[1], 0)
            check_integer("num_steps", steps, 1)
            return steps, backprop_turns
        turns = steps
    limit = config.mean_recurrence if turns is None else turns
    check_integer("turns", limit, 1)
    if backprop_turns is None:
        return limit, limit
    check_integer("backprop_turns", backprop_turns, 1)
    return limit, min(backprop_turns, limit)
