"""A decoder without its head, looped: embedding and prelude, turns of the block, coda and norm."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast

from stars_fast.dual.dual_pass import first_output
from stars_fast.models.adaptive import AdaptiveDepth, Per
from stars_fast.models.call_arguments import check_arguments, take_documents, wants_dict
from stars_fast.models.decoder_layers import (
    CACHE_NAMES,
    LAYER_NAMES,
    DecoderLayers,
    closing_norm,
    run_layers,
)
from stars_fast.models.first_state import placed_noise
from stars_fast.models.folders import check_folder
from stars_fast.models.injection import Adapter
from stars_fast.models.looped_decoder.cache import LayerSlots, LoopedDecoderCache
from stars_fast.models.looped_decoder.config import LoopedDecoderConfig, check_config
from stars_fast.models.looped_decoder.context import Context
from stars_fast.models.looped_decoder.parts import LearnedState
from stars_fast.models.ouro.cache import CACHE, given_cache
from stars_fast.models.ouro.loading import check_loaded, drop_stale_weights
from stars_fast.tokens import Tokens, describe_tokens

_log = logging.getLogger(__name__)


@dataclass
class LoopedDecoderModelOutput(BaseModelOutputWithPast):
    """Attributes, besides transformers':
    last_hidden_state: [B, S, D], what the head reads.
    hidden_states: with `output_hidden_states`, (h^(0), ..., h^(T)), each [B, S, D].
    inputs: [B, S, D], the prelude's output, which turns with an injection read.
    turns: [B, S] int64, turns executed for each token.
    real: [B, S] boolean, False on pads; None where there are none.
    starts: [B or 1, S] int64, where the packed document of each token starts; None if not packed.
    """

    inputs: Tensor | None = None
    turns: Tensor | None = None
    real: Tensor | None = None
    starts: Tensor | None = None


class LoopedDecoderPreTrainedModel(PreTrainedModel):
    """The base of both classes in transformers: initial weights, loading, saving."""

    config_class = LoopedDecoderConfig
    config: LoopedDecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = list(CACHE_NAMES)  # noqa: RUF012
    _supports_sdpa = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', and strict.

        Raises:
            ValueError: a folder holds no whole looped decoder; keys are missing, not expected or of
                another shape; all are named.
        """
        if kwargs.keys().isdisjoint(("subfolder", "variant", "state_dict")):
            check_folder(pretrained_model_name_or_path, ("looped_decoder",))
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # reported below, with the others
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        model, info = loaded
        check_loaded(str(pretrained_model_name_or_path), model, info)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write weights, decoder's configuration and loop settings to one folder."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if args[0] if args else kwargs.get("is_main_process", True):
            drop_stale_weights(Path(save_directory))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        inner: Any = self.base_model
        # transformers leaves out modules of other code that have no weight of their own, as an
        # adapter has none besides its linear map's.
        if isinstance(module, nn.Linear) and module is getattr(inner.adapter, "linear", None):
            init.copy_(module.weight, inner.adapter.start())
        elif isinstance(module, LearnedState):
            init.zeros_(module.vector)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif module is not self and not isinstance(module, PreTrainedModel):
            inner.stem._init_weights(module)


class LoopedDecoderModel(LoopedDecoderPreTrainedModel):
    """Tokens to states.

        e = prelude(embedding(tokens))
        h^(t + 1) = norm_between(block(injection(h^(t), e)))
        out = norm(coda(h^(T)))

    Args:
        config: the configuration; its `decoder` becomes that of the layers.
        decoder: a causal language model of transformers, taken apart; a fresh one by default.

    Attributes:
        stem: the decoder's own model without layers and closing norm: its embedding, with what it
            does to it (scales, learned positions), and its rotary tables.
        prelude_layers, block, coda_layers: the decoder's layers.
        norm: the decoder's closing norm.
        adapter, learned, norm_between: what the loop adds, None where it does not.
    """

    takes_turns = True

    def __init__(self, config: LoopedDecoderConfig, decoder: Any = None) -> None:
        check_config(config)  # again: settings may have been overridden since
        super().__init__(config)
        decoder = fresh_decoder(config) if decoder is None else decoder
        self.stem = decoder.base_model
        config.decoder = self.stem.config
        name = layer_name(self.stem)
        layers = list(getattr(self.stem, name))
        setattr(self.stem, name, nn.ModuleList())
        last = closing_norm(self.stem)
        self.norm = getattr(self.stem, last)
        setattr(self.stem, last, nn.Identity())
        parts = [nn.ModuleList(layers[i] for i in part) for part in config.parts]
        self.prelude_layers, self.block, self.coda_layers = parts
        width = config.hidden_size
        self.adapter = (
            Adapter(width, config.adapter_keeps_state) if config.injection == "adapter" else None
        )
        self.learned = LearnedState(width) if config.state == "learned" else None
        self.norm_between = nn.RMSNorm(width, 1e-6) if config.norm_between else None
        self.gradient_checkpointing = False
        self._no_split_modules = list(self.stem._no_split_modules or [])
        used = [(place, layers[place]) for place in config.layers]
        self._calls = DecoderLayers(used, config.decoder, self.rotary)
        check_takes_cache(self._calls)
        self.post_init()

    @property
    def rotary(self) -> nn.Module | None:
        """The decoder's rotary tables; None where its positions are not rotary."""
        return getattr(self.stem, "rotary_emb", None)

    def get_input_embeddings(self) -> Any:
        """The decoder's."""
        return self.stem.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the decoder's."""
        self.stem.set_input_embeddings(value)

    def made_of(self) -> tuple[Any, list[Tensor]]:
        """Settings and tensors that the context of a turn depends on besides the call."""
        return self._calls.made_of()

    # -- the parts of a call, one after the other

    def prepare(
        self,
        h: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs: Tensor | None = None,
        cache: LoopedDecoderCache | None = None,
    ) -> Context:
        """The context of one call.

        Args:
            h: [B, S, D]; shape, dtype and device count.
            attention_mask: [B, past + S], 1 on real tokens. Without it all tokens are real.
            position_ids: [B or 1, S] integers. By default they count the real tokens. Where they
                fall or stay within a row, a packed document begins; not with a mask.
            cu_seqlens: [n + 1] integers, bounds of documents packed in a batch of one row.
            inputs: [B, S, D], the prelude's output, for turns with an injection.
            cache: its tokens come before these.

        Raises:
            TypeError, ValueError: an argument of the wrong type or shape, named.
        """
        past = 0 if cache is None else cache.get_seq_length()
        tokens = describe_tokens(h, attention_mask, position_ids, cu_seqlens, past, look=True)
        if past and (tokens.packed or tokens.restarts is not None):
            raise ValueError(
                "position_ids: expected positions that rise along a row with a cache, "
                "got packed documents"
            )
        return self._context(h, tokens, inputs, cache)

    def _context(
        self,
        h: Tensor,
        tokens: Tokens,
        inputs: Tensor | None,
        cache: LoopedDecoderCache | None,
        rows: Tensor | None = None,
    ) -> Context:
        every = self._calls.arguments(h, tokens)
        ends = self.config.prelude, self.config.prelude + self.config.block
        return Context(
            tokens, every[: ends[0]], every[slice(*ends)], every[ends[1] :], inputs, cache, rows
        )

    def embed(
        self, tokens: Tensor | None, context: Context, embeds: Tensor | None = None
    ) -> Tensor:
        """Token ids [B, S] (or their embeddings [B, S, D]) -> what the first layer reads."""
        given = {"input_ids": tokens} if embeds is None else {"inputs_embeds": embeds}
        return first_output(
            self.stem(**given, position_ids=context.tokens.positions, use_cache=False)
        )

    def prelude(self, h: Tensor, context: Context) -> Tensor:
        """The embedding through the layers before the loop, [B, S, D]."""
        slots = self._slots(context, 0)
        return run_layers(self.prelude_layers, h, context.prelude, slots)

    def first_state(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """h^(0) [B, S, D] from the prelude's output. Noise is drawn anew in training; else it is a
        function of the `positions` [B or 1, S]."""
        if self.learned is not None:
            return self.learned(inputs)
        if self.config.state == "prelude":
            return inputs
        if self.training:
            return torch.randn_like(inputs) * self.config.state_std
        noise = placed_noise(positions, inputs.shape[-1]) * self.config.state_std
        return noise.to(inputs.device, inputs.dtype).expand(inputs.shape)

    def turn(self, h: Tensor, context: Context, index: int = 0) -> Tensor:
        """One turn, h [B, S, D] -> [B, S, D]; a `Dual` gives a `Dual`.

        Args:
            context: from `prepare`, with `inputs` where the model has an injection.
            index: of the turn; it matters for the cache alone.

        Raises:
            ValueError: the context has no inputs to inject.
        """
        if self.config.injection != "none":
            if context.inputs is None:
                raise ValueError(
                    f"inputs: expected the prelude's output [B, S, D] with injection "
                    f"{self.config.injection!r}, got None"
                )
            inputs = context.inputs.to(h.device)  # the block of a large model may be elsewhere
            h = h + inputs if self.adapter is None else self.adapter(h, inputs)
        slots = None
        if context.cache is not None:
            slots = LayerSlots(context.cache, self.config.parts[1], turn=index, rows=context.rows)
        h = run_layers(self.block, h, context.block, slots)
        return h if self.norm_between is None else self.norm_between(h)

    def coda(self, h: Tensor, context: Context) -> Tensor:
        """h [B, S, D] after the last turn -> what the head reads."""
        slots = self._slots(context, 2)
        return self.norm(run_layers(self.coda_layers, h, context.coda, slots))

    def _slots(self, context: Context, part: int) -> LayerSlots | None:
        """The cache for prelude (0) or coda (2)."""
        if context.cache is None:
            return None
        first = 0 if part == 0 else self.config.prelude
        return LayerSlots(context.cache, self.config.parts[part], first)

    # -- a call

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LoopedDecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        turns: int | None = None,
        tol: float | None = None,
        tol_per: Per = "sequence",
        cu_seqlens: Tensor | None = None,
        cache: LoopedDecoderCache | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> LoopedDecoderModelOutput | tuple[Any, ...]:
        """Run prelude, turns and coda.

        Args:
            input_ids: [B, S] int64; or inputs_embeds: [B, S, D].
            attention_mask: [B, past + S], 1 on real tokens.
            position_ids: [B or 1, S]; by default they count the real tokens.
            past_key_values: a `LoopedDecoderCache`, filled by calls of as many turns; also by the
                name `cache`.
            use_cache: return one where none is given; by default `config.use_cache` outside
                training, and not for packed documents. Gradient checkpointing goes without, as in
                transformers.
            turns: how many; by default `config.total_ut_steps`.
            tol: a sequence all of whose (new) tokens changed by at most this, relative, in a turn
                takes no further turn; its keys and values stand in for those of the turns left
                out. 0 for no such stop, by default `config.convergence_tol`.
            tol_per: "sequence", or "token": a token that rests keeps its state while others of its
                sequence go on (`models.adaptive`).
            cu_seqlens: [n + 1] bounds of documents packed in a batch of one row; also as
                `cu_seq_lens_q` and the names beside it (`call_arguments.take_documents`).
            output_hidden_states: return the states before and after each turn.

        Raises:
            TypeError, ValueError: an argument of the wrong type, shape or range, named.
        """
        config = self.config
        position_ids, cu_seqlens = take_documents(kwargs, position_ids, cu_seqlens)
        check_arguments(kwargs, config, "looped decoder")
        like = self.like(input_ids, inputs_embeds)
        limit = config.total_ut_steps if turns is None else turns
        depth = AdaptiveDepth(like, limit, config.convergence_tol if tol is None else tol, tol_per)
        given = given_cache(past_key_values, cache, LoopedDecoderCache)
        cache = self._cache(given, use_cache, limit, len(like))
        context = self.prepare(like, attention_mask, position_ids, cu_seqlens, cache=cache)
        tokens = context.tokens
        if tokens.starts is not None and cache is not None:
            if given is not None or use_cache:
                raise ValueError("use_cache: expected False for packed documents, got a cache")
            cache, context = None, replace(context, cache=None)
        inputs = self.prelude(self.embed(input_ids, context, inputs_embeds), context)
        context = replace(context, inputs=inputs)
        h = self.first_state(inputs, tokens.positions)
        keep = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states, part, rows = [h], context, depth.rows
        while depth.goes_on:
            h = depth.step(h, self.turn(depth.of(h), part, depth.taken), tokens.new_real)
            if keep:
                states.append(h)
            if depth.rows is not None and depth.rows is not rows:
                rows = depth.rows
                chosen = tokens.take_rows(rows)
                part = self._context(like[rows], chosen, inputs[rows], cache, rows)
        if cache is not None and depth.taken < limit:
            cache.repeat_from(depth.taken, h.shape[1])
        held: dict[str, Any] = {CACHE: cache}
        output = LoopedDecoderModelOutput(
            last_hidden_state=self.coda(h, context),
            hidden_states=tuple(states) if keep else None,
            inputs=inputs,
            turns=depth.turns,
            real=tokens.new_real,
            starts=tokens.starts,
            **held,
        )
        return output if wants_dict(config, kwargs.get("return_dict")) else output.to_tuple()

    def like(self, input_ids: Tensor | None, inputs_embeds: Tensor | None = None) -> Tensor:
        """A tensor [B, S, D] without memory of the call's shape, dtype and device."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either input_ids or inputs_embeds")
        width = self.config.hidden_size
        if inputs_embeds is not None:
            if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != width:
                raise ValueError(
                    f"inputs_embeds: expected [B, S, {width}], got {list(inputs_embeds.shape)}"
                )
            return inputs_embeds.new_zeros(()).expand(inputs_embeds.shape)
        assert input_ids is not None
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "input_ids: expected integers [B, S], "
                f"got {input_ids.dtype} {list(input_ids.shape)}"
            )
        if not input_ids.numel():
            raise ValueError(f"input_ids: expected a token at least, got {list(input_ids.shape)}")
        dtype = self.get_input_embeddings().weight.dtype
        zero = torch.zeros((), dtype=dtype, device=input_ids.device)
        return zero.expand(*input_ids.shape, width)

    def _cache(self, given: Any, use_cache: bool | None, turns: int, batch: int) -> Any:
        """The cache of a call: the one given, a new one, or None."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if given is not None and given.get_seq_length():
                raise ValueError(
                    "past_key_values: expected none with gradient checkpointing, got a cache that "
                    f"holds {given.get_seq_length()} tokens"
                )
            if given is not None or use_cache:
                _log.warning("use_cache: gradient checkpointing goes without a cache")
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if given is None and not use_cache:
            return None
        cache = self.empty_cache() if given is None else given
        cache.bind(self.config.block, turns, batch, self.config.prelude + self.config.coda)
        return cache

    def empty_cache(self) -> LoopedDecoderCache:
        """A cache for this model, of any number of turns."""
        return LoopedDecoderCache(self.config.block, self.config.prelude + self.config.coda)


def fresh_decoder(config: LoopedDecoderConfig) -> Any:
    """A causal language model of the decoder's own class, with initial weights."""
    return causal_class(config.decoder)(config.decoder)


def causal_class(config: Any) -> Any:
    """The class of causal language models of transformers for a decoder's configuration.

    Raises:
        TypeError: it has none.
    """
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise TypeError(
            "model: expected a causal language model of transformers, got a configuration of "
            f"{getattr(config, 'model_type', type(config).__name__)!r}"
        )
    return known[type(config)]


def layer_name(stack: Any) -> str:
    """The name under which a decoder holds its layers.

    Raises:
        TypeError: it has none of the known names.
    """
    for name in LAYER_NAMES:
        if isinstance(getattr(stack, name, None), nn.ModuleList):
            return name
    raise TypeError(
        f"model: expected a decoder with a ModuleList {' or '.join(LAYER_NAMES)}, got "
        f"{type(stack).__name__}"
    )


def check_takes_cache(calls: DecoderLayers) -> None:
    """Raise TypeError where a layer takes no cache of keys and values, as those without attention
    don't."""
    for names in calls.accepted:
        if not names & set(CACHE_NAMES):
            raise TypeError(
                f"model: expected layers of attention that take {' or '.join(CACHE_NAMES)}, got "
                f"ones that take {sorted(names)}"
            )
