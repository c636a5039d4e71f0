"""A looped decoder in one file, for folders that open without the package that wrote them.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.generate(**inputs, turns=8, max_new_tokens=64)

The layers are those of transformers' own decoder, which the configuration names (`decoder`):

    e = prelude(embedding(tokens))
    h^(t + 1) = norm_between(block(injection(h^(t), e)))
    logits = head(norm(coda(h^(T))))

`turns`, `tol` and `tol_per` are arguments of a call and of `generate`, and settings of a
`GenerationConfig`; defaults of the first two are in config.json. It needs PyTorch and transformers
5, and is for reading and generating; stars_fast trains the same folder.

Shapes: B rows, S tokens, P tokens in the cache, D width, H heads, W width of a head, T turns.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    DynamicCache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

# The cache by its name in this version of transformers: `past_key_values`, later `cache`.
_MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
CACHE = "cache" if "cache" in _MASK_ARGUMENTS else "past_key_values"

# Names of a layer's argument for the cache: that of today, that of before, and GPT-NeoX's.
_CACHE_NAMES = ("cache", "past_key_values", "layer_past")
_LAYER_LISTS = ("layers", "h")
_CLOSING_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")

# Layers hand these on to their attention if they don't name them.
_HANDED_ON = {"attention_mask", "position_ids", "position_embeddings"}

# Arguments that transformers passes along to any model, and have no effect here.
_PASSED_ALONG = frozenset(
    "cache_position is_first_iteration output_attentions return_dict token_type_ids".split()
)

_DEPTH = ("turns", "tol", "tol_per")

_NOISE_ROWS = 64  # places of a block of noise that is drawn at once


class LoopedDecoderConfig(PretrainedConfig):
    """A decoder of transformers whose middle layers are repeated, as its config.json has it.

    Args:
        decoder: configuration of the decoder as it was before it was looped, or its `to_dict`.
        layers: the layers that are used, in the order in which they run, by their place in the
            decoder; all by default.
        prelude, block, coda: how many of them come before the loop, make up its turn, and follow
            it; `block` None for those between.
        injection: what a turn takes from the prelude besides the state: "none", "add" (the
            prelude's output is added to the state), "adapter" (a linear map of both).
        state: what the first turn starts from: "prelude" (its output), "noise" (normal, of standard
            deviation `state_std`), "learned" (one vector for all tokens).
        norm_between: whether a turn ends with a norm of its own (RMSNorm).
        total_ut_steps: turns (also by the name `turns`).
        convergence_tol: a sequence whose states change by at most this (relative, in the L2 norm,
            every token) takes no further turn; None or 0 for no such stop (also by the name `tol`).
        adapter_start: what an adapter gives before training: "state", "inputs" (the prelude's
            output), or None for the state where the first one is the prelude's output, else inputs.

    Raises:
        ValueError: this version of transformers does not know the decoder.
    """

    model_type = "looped_decoder"
    sub_configs: ClassVar[dict[str, Any]] = {"decoder": AutoConfig}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache", "turns"]
    attribute_map: ClassVar[dict[str, str]] = {"turns": "total_ut_steps", "tol": "convergence_tol"}

    def __init__(
        self,
        decoder: PretrainedConfig | dict[str, Any] | None = None,
        layers: Sequence[int] | None = None,
        prelude: int = 1,
        block: int | None = None,
        coda: int = 1,
        injection: str = "none",
        state: str = "prelude",
        state_std: float = 0.02,
        norm_between: bool = False,
        total_ut_steps: int = 4,
        convergence_tol: float | None = None,
        use_cache: bool = True,
        adapter_start: str | None = None,
        **kwargs: Any,
    ) -> None:
        if decoder is None:  # transformers makes a configuration without arguments
            decoder = {"model_type": "llama"}
        self.decoder: Any = _decoder_config(decoder) if isinstance(decoder, dict) else decoder
        every = range(self.decoder.num_hidden_layers)
        self.layers = list(every if layers is None else layers)
        self.prelude = prelude
        self.block = len(self.layers) - prelude - coda if block is None else block
        self.coda = coda
        self.injection = injection
        self.state = state
        self.state_std = state_std
        self.norm_between = norm_between
        self.total_ut_steps = total_ut_steps
        self.convergence_tol = convergence_tol
        self.use_cache = use_cache
        self.adapter_start = adapter_start
        for alias in self.attribute_map:
            if alias in kwargs:
                setattr(self, alias, kwargs.pop(alias))
        kwargs["tie_word_embeddings"] = getattr(self.decoder, "tie_word_embeddings", False)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            kwargs.setdefault(name, getattr(self.decoder, name, None))
        # transformers sets both for the parts of a configuration too, where they are not given to
        # None; experts are the decoder's alone.
        kwargs.setdefault("attn_implementation", getattr(decoder, "_attn_implementation", None))
        experts = getattr(self.decoder, "_experts_implementation", None)
        super().__init__(**kwargs)
        if experts is not None:
            self.decoder._experts_implementation = experts

    @property
    def vocab_size(self) -> int:
        """The decoder's."""
        return self.decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        """The decoder's."""
        return self.decoder.hidden_size

    @property
    def num_attention_heads(self) -> int:
        """The decoder's."""
        return self.decoder.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """The decoder's."""
        return self.decoder.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """The decoder's."""
        return self.decoder.head_dim

    @property
    def max_position_embeddings(self) -> int:
        """The decoder's."""
        return self.decoder.max_position_embeddings

    @property
    def parts(self) -> tuple[list[int], list[int], list[int]]:
        """The places in the decoder of the layers of prelude, block and coda."""
        ends = self.prelude, self.prelude + self.block
        return self.layers[: ends[0]], self.layers[ends[0] : ends[1]], self.layers[ends[1] :]

    def to_diff_dict(self) -> dict[str, Any]:
        """As transformers', with the decoder's configuration whole: defaults are its class's."""
        return super().to_diff_dict() | {"decoder": self.decoder.to_dict()}


class LoopedDecoderCache(DynamicCache):
    """Slots of keys and values: those of the layers of prelude and coda first, then those of the
    block for each turn.

    Attributes:
        outside: layers of prelude and coda together.
        turn_layers: layers of a turn.
        turns: of the calls that use it; None before the first.
    """

    def __init__(self, layers: int, outside: int) -> None:
        super().__init__()
        self.turn_layers = layers
        self.outside = outside
        self.turns: int | None = None

    def bind(self, turns: int) -> None:
        """Take part in a call of so many turns.

        Raises:
            ValueError: it holds tokens at another number of turns.
        """
        if self.turns not in (None, turns):
            raise ValueError(
                f"turns: this cache holds {self.get_seq_length()} tokens at {self.turns} turns and "
                f"can't go on with {turns}; start with an empty cache"
            )
        self.turns = turns

    def reset(self) -> None:
        """Forget all tokens, and the number of turns."""
        self.layers.clear()
        self.turns = None

    def first_slot(self, turn: int) -> int:
        """The slot of a turn's first layer; its others follow."""
        return self.outside + turn * self.turn_layers

    def repeat_from(self, turn: int, length: int) -> None:
        """Let turn `turn` and all later ones have the last `length` tokens of the turn before."""
        assert self.turns is not None
        for later in range(turn, self.turns):
            for layer in range(self.turn_layers):
                kept = self.newest(self.first_slot(turn - 1) + layer, length)
                self.update(*kept, self.first_slot(later) + layer)

    def newest(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """The last `length` keys and values of a slot."""
        held: Any = self.layers[slot]
        return held.keys[..., -length:, :], held.values[..., -length:, :]


class _Slots:
    """The cache as some layers of the decoder see it in one pass.

    Args:
        cache: of the call.
        places: of the layers in the decoder, by which they ask.
        first: slot of the first of them.
        goes_on: [B] boolean, in a turn that not all rows take: the others keep the keys and values
            of the turn before.
    """

    def __init__(
        self,
        cache: LoopedDecoderCache,
        places: Sequence[int],
        first: int,
        goes_on: Tensor | None = None,
    ) -> None:
        self.cache, self.goes_on = cache, goes_on
        self.slot = {place: first + i for i, place in enumerate(places)}

    def update(
        self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values [B, Hkv, S, W] of a layer; return all, [B, Hkv, P + S, W]."""
        slot = self.slot[layer_idx]
        if self.goes_on is not None:
            kept = self.cache.newest(slot - self.cache.turn_layers, k.shape[-2])
            rows = self.goes_on.to(k.device)[:, None, None, None]
            k, v = (torch.where(rows, new, old) for new, old in zip((k, v), kept, strict=True))
        keys, values = self.cache.update(k, v, slot)
        return keys, values


class LoopedDecoderAdapter(nn.Module):
    """A linear map of the state and the prelude's output, [B, S, D] each, to what a turn reads."""

    def __init__(self, width: int, keeps_state: bool) -> None:
        super().__init__()
        self.keeps_state = keeps_state
        self.linear = nn.Linear(2 * width, width, bias=False)

    def start(self) -> Tensor:
        """The weight [D, 2 D] that it starts with: one of its inputs, as it is."""
        width = self.linear.out_features
        whole, nothing = torch.eye(width), torch.zeros(width, width)
        return torch.cat((whole, nothing) if self.keeps_state else (nothing, whole), 1)

    def forward(self, h: Tensor, inputs: Tensor) -> Tensor:
        return self.linear(torch.cat((h, inputs), -1))


class LoopedDecoderLearnedState(nn.Module):
    """One vector [D] that every token starts from."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, S, D], of the shape, dtype and device of `inputs`."""
        return self.vector.to(inputs.device, inputs.dtype).expand(inputs.shape)


@dataclass
class LoopedDecoderModelOutput(BaseModelOutputWithPast):
    """Attributes, besides transformers':
    last_hidden_state: [B, S, D], what the head reads.
    hidden_states: with `output_hidden_states`, (h^(0), ..., h^(T)), each [B, S, D].
    turns: [B, S] int64, turns executed for each token.
    """

    turns: Tensor | None = None


@dataclass
class LoopedDecoderCausalLMOutput(CausalLMOutputWithPast):
    """Attributes, besides transformers':
    hidden_states, turns: as `LoopedDecoderModelOutput`.
    """

    turns: Tensor | None = None


class LoopedDecoderPreTrainedModel(PreTrainedModel):
    """The base of both classes in transformers."""

    config_class = LoopedDecoderConfig
    config: LoopedDecoderConfig
    base_model_prefix = "model"
    _skip_keys_device_placement = list(_CACHE_NAMES)  # noqa: RUF012
    _supports_sdpa = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', which would fill weights that are missing with random numbers. So they
        are where its version calls the weights of a decoder otherwise than the one that wrote them.

        Raises:
            ValueError: weights are missing.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        path = pretrained_model_name_or_path
        loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"{path}: expected all weights by the names that transformers "
                f"{transformers_version} has for them, got none of {len(missing)}, such as "
                f"{missing[0]}"
            )
        return (model, info) if wants_info else model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        inner: Any = self.base_model
        # transformers leaves out modules of other code that have no weight of their own, as an
        # adapter has none besides its linear map's.
        if isinstance(module, nn.Linear) and module is getattr(inner.adapter, "linear", None):
            init.copy_(module.weight, inner.adapter.start())
        elif isinstance(module, LoopedDecoderLearnedState):
            init.zeros_(module.vector)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif module is not self and not isinstance(module, PreTrainedModel):
            inner.stem._init_weights(module)


class LoopedDecoderModel(LoopedDecoderPreTrainedModel):
    """Tokens to states.

    Args:
        config: its `decoder` becomes that of the layers.
        decoder: a causal language model of transformers, taken apart; a fresh one by default.

    Raises:
        TypeError, ValueError: a setting of the configuration out of range, or a decoder that this
            version of transformers does not have or builds of other parts.
    """

    def __init__(self, config: LoopedDecoderConfig, decoder: Any = None) -> None:
        _check(config)
        super().__init__(config)
        decoder = _fresh_decoder(config) if decoder is None else decoder
        self.stem = decoder.base_model
        config.decoder = self.stem.config
        layers = list(_taken(self.stem, _LAYER_LISTS, nn.ModuleList()))
        self.norm = _taken(self.stem, _CLOSING_NORMS, nn.Identity())
        self.prelude_layers, self.block, self.coda_layers = (
            nn.ModuleList(layers[i] for i in part) for part in config.parts
        )
        width = config.hidden_size
        usual = "state" if config.state == "prelude" else "inputs"
        self.adapter = (
            LoopedDecoderAdapter(width, (config.adapter_start or usual) == "state")
            if config.injection == "adapter"
            else None
        )
        self.learned = LoopedDecoderLearnedState(width) if config.state == "learned" else None
        self.norm_between = nn.RMSNorm(width, 1e-6) if config.norm_between else None
        self._no_split_modules = list(self.stem._no_split_modules or [])
        used = [layers[place] for place in config.layers]
        self._accepted = [_accepted(layer) for layer in used]
        self._kinds = [
            _attention_kind(layer, place, config.decoder)
            for layer, place in zip(used, config.layers, strict=True)
        ]
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """The decoder's."""
        return self.stem.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the decoder's."""
        self.stem.set_input_embeddings(value)

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
        tol_per: str = "sequence",
        cache: LoopedDecoderCache | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> LoopedDecoderModelOutput | tuple[Any, ...]:
        """Run prelude, turns and coda.

        Args:
            input_ids: [B, S] integers; or inputs_embeds: [B, S, D].
            attention_mask: [B, P + S], 1 on real tokens.
            position_ids: [B or 1, S]; by default they count the real tokens. Without a mask a
                packed document begins where they fall or stay within a row.
            past_key_values: a `LoopedDecoderCache`, filled by calls of as many turns; also by the
                name `cache`.
            turns: how many; by default `config.total_ut_steps`.
            tol: a sequence whose states a turn changes by at most this takes no further turn.
            tol_per: "sequence", or "token": a token that rests keeps its state while others of its
                sequence go on.

        Raises:
            TypeError, ValueError: an argument that is unknown or out of range, named.
        """
        config = self.config
        _check_call(kwargs, input_ids, inputs_embeds)
        limit, tol = _depth(config, turns, tol, tol_per)
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        if None not in (past_key_values, cache) and past_key_values is not cache:
            raise ValueError("cache: expected None when past_key_values is given, got both")
        held = self._cache(past_key_values if cache is None else cache, use_cache, limit)
        past = 0 if held is None else held.get_seq_length()
        positions = _positions(given, past, attention_mask, position_ids)
        documents = None if attention_mask is not None else _documents(positions)
        if documents is not None:
            if past or use_cache:
                raise ValueError("use_cache: expected False for packed documents, got a cache")
            held = None
        embedded = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": given}
        h = _tensor(self.stem(**embedded, position_ids=positions, use_cache=False))
        positions = positions.to(h.device)
        every = self._arguments(h, past, positions, attention_mask, documents)
        ends = config.prelude, config.prelude + config.block
        slots = None if held is None else _Slots(held, config.parts[0], 0)
        inputs = _run(self.prelude_layers, h, every[: ends[0]], slots)
        h = self._first_state(inputs, positions)
        keep = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [h]
        pads = None if attention_mask is None else ~attention_mask[:, past:].bool().to(h.device)
        taken = torch.full(h.shape[:2], limit, device=h.device)
        moving: Tensor | None = None  # [B, S], tokens that a turn may still change
        for turn in range(limit):
            goes_on = None if moving is None else moving.any(1)
            after = self._turn(h, inputs, every[ends[0] : ends[1]], held, turn, goes_on)
            if moving is not None:
                after = torch.where(moving[..., None], after, h)
            before, h = h, after
            if keep:
                states.append(h)
            if tol and turn + 1 < limit:
                still = _still(before, h, tol, pads)
                if tol_per == "sequence":
                    still = still.all(1, keepdim=True).expand_as(still)
                moving = torch.ones_like(still) if moving is None else moving
                taken[(moving & still).to(taken.device)] = turn + 1
                moving = moving & ~still
                if not moving.any():
                    if held is not None:
                        held.repeat_from(turn + 1, h.shape[1])
                    break
        slots = None if held is None else _Slots(held, config.parts[2], config.prelude)
        h = self.norm(_run(self.coda_layers, h, every[ends[1] :], slots))
        named: dict[str, Any] = {CACHE: held}
        output = LoopedDecoderModelOutput(
            last_hidden_state=h, hidden_states=tuple(states) if keep else None, turns=taken, **named
        )
        return output if kwargs.get("return_dict") in (None, True) else output.to_tuple()

    def _turn(
        self,
        h: Tensor,
        inputs: Tensor,
        arguments: list[dict[str, Any]],
        cache: LoopedDecoderCache | None,
        turn: int,
        goes_on: Tensor | None,
    ) -> Tensor:
        """One turn, h [B, S, D] -> [B, S, D]."""
        if self.config.injection != "none":
            inputs = inputs.to(h.device)
            h = h + inputs if self.adapter is None else self.adapter(h, inputs)
        slots = None
        if cache is not None:
            slots = _Slots(cache, self.config.parts[1], cache.first_slot(turn), goes_on)
        h = _run(self.block, h, arguments, slots)
        return h if self.norm_between is None else self.norm_between(h)

    def _first_state(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """h^(0) [B, S, D]. Noise is drawn anew in training; else it is a function of the
        positions."""
        if self.learned is not None:
            return self.learned(inputs)
        if self.config.state == "prelude":
            return inputs
        if self.training:
            return torch.randn_like(inputs) * self.config.state_std
        noise = _placed_noise(positions, inputs.shape[-1]) * self.config.state_std
        return noise.to(inputs.device, inputs.dtype).expand(inputs.shape)

    def _arguments(
        self,
        h: Tensor,
        past: int,
        positions: Tensor,
        attention_mask: Tensor | None,
        documents: Tensor | None,
    ) -> list[dict[str, Any]]:
        """The arguments of each layer besides the state [B, S, D].

        Raises:
            ValueError: a layer can't take the mask that it needs, or the attention implementation
                is another than sdpa or eager.
        """
        config: Any = self.stem.config
        name = getattr(config, "_attn_implementation", None)
        if name not in (None, "sdpa", "eager"):
            raise ValueError(f"attn_implementation: expected sdpa or eager, got {name!r}")
        rotary = getattr(self.stem, "rotary_emb", None)
        typed = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        shared: dict[str, Any] = {
            "position_ids": positions,
            "cache_position": torch.arange(past, past + h.shape[1], device=h.device),
            "use_cache": False,
            "alibi": None,  # Falcon's layers take it, and None where positions are rotary
            **dict.fromkeys(_CACHE_NAMES),
        }
        by_kind = {}
        for kind in set(self._kinds):
            window = config.sliding_window if kind == "sliding_attention" else None
            mask = _visible(h, past, attention_mask, documents, window, name == "eager")
            if mask is not None and name == "eager":  # adds what it is given
                zero = torch.zeros((), dtype=h.dtype, device=h.device)
                mask = torch.where(mask, zero, torch.finfo(h.dtype).min)
            by_kind[kind] = shared | {"attention_mask": mask}
            if rotary is not None:
                with torch.no_grad():
                    tables = rotary(h, positions, *([kind] if typed else []))
                by_kind[kind]["position_embeddings"] = tables
        given = []
        for kind, names in zip(self._kinds, self._accepted, strict=True):
            if by_kind[kind]["attention_mask"] is not None and "attention_mask" not in names:
                raise ValueError(
                    f"attention_mask: expected none for layers of {config.model_type}, which take "
                    "no mask, got pads, documents or a window that need one"
                )
            given.append({n: value for n, value in by_kind[kind].items() if n in names})
        return given

    def _cache(self, given: Any, use_cache: bool | None, turns: int) -> LoopedDecoderCache | None:
        if given is not None and not isinstance(given, LoopedDecoderCache):
            raise TypeError(
                "past_key_values: expected a LoopedDecoderCache, which has a slot for each layer "
                f"of each turn, got {type(given).__name__}"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if given is None and not use_cache:
            return None
        cache = self.empty_cache() if given is None else given
        cache.bind(turns)
        return cache

    def empty_cache(self) -> LoopedDecoderCache:
        """A cache for this model, of any number of turns."""
        return LoopedDecoderCache(self.config.block, self.config.prelude + self.config.coda)


class LoopedDecoderForCausalLM(LoopedDecoderPreTrainedModel, GenerationMixin):
    """A looped decoder with its head; `turns`, `tol` and `tol_per` as `LoopedDecoderModel`."""

    accepts_loss_kwargs = True

    def __init__(self, config: LoopedDecoderConfig) -> None:
        super().__init__(config)
        decoder = _fresh_decoder(config)
        self.lm_head = decoder.get_output_embeddings()
        self.model = LoopedDecoderModel(config, decoder)
        embedding = self.model.get_input_embeddings()
        name = next(name for name, each in self.named_modules() if each is embedding)
        self._tied_weights_keys = {"lm_head.weight": f"{name}.weight"}
        self.post_init()

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
        tol_per: str = "sequence",
        cache: LoopedDecoderCache | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> LoopedDecoderCausalLMOutput | tuple[Any, ...]:
        """Logits, and the loss of the next token where labels are given.

        Args:
            labels: [B, S] int64, the token ids themselves (they are shifted here), -100 where there
                is no target.
            logits_to_keep: logits of the last so many positions, or of positions [n]; 0 for all.
            num_items_in_batch: divides the summed loss, as a Trainer asks for that accumulates
                gradients; the number of targets by default.
            turns, tol, tol_per and the rest: as `LoopedDecoderModel.forward`.

        Raises:
            TypeError, ValueError: an argument that is unknown or out of range, named.
        """
        return_dict = kwargs.pop("return_dict", None)
        outputs: Any = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            turns=turns,
            tol=tol,
            tol_per=tol_per,
            cache=cache,
            output_hidden_states=output_hidden_states,
            **kwargs,
        )
        h = kept = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            kept = h[:, logits_to_keep]
        elif logits_to_keep:
            kept = h[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            targets = self._targets(labels, attention_mask, position_ids)
            wide = torch.promote_types(h.dtype, torch.float32)
            logits = self._logits(h)
            found = logits.to(wide).flatten(0, 1), targets.to(logits.device).flatten()
            if num_items_in_batch is None:
                loss = F.cross_entropy(*found)
            else:
                count = torch.as_tensor(num_items_in_batch, device=logits.device)
                loss = F.cross_entropy(*found, reduction="sum") / count
        named: dict[str, Any] = {CACHE: outputs.get(CACHE)}
        output = LoopedDecoderCausalLMOutput(
            loss=loss,
            logits=self._logits(kept),
            hidden_states=outputs.hidden_states,
            turns=outputs.turns,
            **named,
        )
        return output if return_dict in (None, True) else output.to_tuple()

    def _logits(self, h: Tensor) -> Tensor:
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

    def _targets(
        self, labels: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """[B, S]: the token that follows each in its document; -100 on pads and at the end."""
        if getattr(self.config.decoder, "output_router_logits", False):
            raise ValueError(
                "output_router_logits: expected False with labels, got True: the auxiliary loss of "
                "a router is not added here"
            )
        length = labels.shape[1]
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        if attention_mask is not None:
            return targets.masked_fill(~attention_mask[:, -length:].bool(), -100)
        if position_ids is not None:
            ends = F.pad(position_ids.view(-1, length).diff(dim=1) <= 0, (0, 1))
            targets = targets.masked_fill(ends, -100)
        return targets

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """As transformers', which would keep what a load says of the depth there too."""
        for name in _DEPTH:
            kwargs.pop(name, None)
        GenerationMixin.adjust_generation_fn(cast(Any, self), *args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Any, *, inputs_embeds: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As transformers', without the tokenizers, which `generate` hands on."""
        for name in ("tokenizer", "assistant_tokenizer"):
            kwargs.pop(name, None)
        return GenerationMixin.prepare_inputs_for_generation(
            cast(Any, self), input_ids, inputs_embeds=inputs_embeds, **kwargs
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: it has one slot of a cache for each layer."""
        raise NotImplementedError(
            "generate_batch: expected generate, which has a slot for each layer of each turn"
        )

    def _prepare_generation_config(
        self, generation_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """As transformers', and the depth handed to the model: as the call says, else as the
        generation settings do."""
        said: dict[str, Any] = {}
        for level in (generation_config, self.generation_config):
            held = {} if level is None else vars(level)
            said = {name: held[name] for name in _DEPTH if held.get(name) is not None} | said
        said |= {n: kwargs.pop(n) for n in _DEPTH if n in kwargs}
        said = {name: value for name, value in said.items() if value is not None}
        prepared, others = GenerationMixin._prepare_generation_config(
            cast(Any, self), generation_config, *args, **kwargs
        )
        for name in _DEPTH:
            vars(prepared).pop(name, None)
        vars(prepared).update(said)  # some ways to generate come here twice
        return prepared, others | said

    def _get_candidate_generator(  # type: ignore[override]
        self, generation_config: Any, *args: Any, model_kwargs: Any, **kwargs: Any
    ) -> Any:
        """Let an assistant think as deep as it says itself, or this model at fewer turns draft."""
        generation_config = copy.deepcopy(generation_config)
        for name in _DEPTH:
            vars(generation_config).pop(name, None)
        draft = {name: value for name, value in model_kwargs.items() if name not in _DEPTH}
        turns, generation_config.assistant_early_exit = generation_config.assistant_early_exit, None
        if turns is not None:
            kwargs["assistant_model"] = self
            draft["turns"] = turns
        mixin: Any = GenerationMixin
        return mixin._get_candidate_generator(
            self, generation_config, *args, model_kwargs=draft, **kwargs
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Give `generate` a cache with a slot for each turn."""
        for name in ("cache", "past_key_values"):  # by either name
            if model_kwargs.get(name) is not None:
                model_kwargs[CACHE] = model_kwargs.pop(name)
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            kind = generation_config.cache_implementation
            if kind not in (None, "dynamic", "dynamic_full"):
                raise ValueError(
                    "cache_implementation: expected None or 'dynamic' for a looped model, "
                    f"got {kind!r}"
                )
            model_kwargs[CACHE] = self.model.empty_cache()
            return None
        return GenerationMixin._prepare_cache_for_generation(
            cast(Any, self), generation_config, model_kwargs, *args, **kwargs
        )


# -- the decoder's parts


def _decoder_config(fields: dict[str, Any]) -> Any:
    """The decoder's configuration from its `to_dict`."""
    try:
        return AutoConfig.for_model(**fields)
    except ValueError as error:
        raise ValueError(
            f"decoder: expected a model_type that transformers {transformers_version} knows, got "
            f"{fields.get('model_type')!r}: {error}"
        ) from error


def _fresh_decoder(config: LoopedDecoderConfig) -> Any:
    """A causal language model of the decoder's own class, with initial weights."""
    kind = type(config.decoder)
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if kind not in known:
        raise TypeError(
            f"decoder: expected one with a causal language model in transformers "
            f"{transformers_version}, got {kind.__name__}"
        )
    return known[kind](config.decoder)


def _taken(stack: Any, names: Sequence[str], instead: nn.Module) -> Any:
    """The part of a decoder that has one of these names; another takes its place."""
    for name in names:
        if isinstance(part := getattr(stack, name, None), nn.Module):
            setattr(stack, name, instead)
            return part
    raise TypeError(
        f"decoder: expected one with a part {' or '.join(names)}, got {type(stack).__name__}"
    )


def _accepted(layer: nn.Module) -> set[str]:
    """Names of the arguments that a layer takes besides the state."""
    parameters = list(inspect.signature(layer.forward).parameters.values())[1:]
    names = {p.name for p in parameters}
    return names | _HANDED_ON if any(p.kind is p.VAR_KEYWORD for p in parameters) else names


def _attention_kind(layer: nn.Module, place: int, config: Any) -> str:
    """full_attention or sliding_attention. Without a word on it a layer slides where its file makes
    masks of a window: a Llama whose configuration has kept the key does not."""
    kinds = getattr(config, "layer_types", None)
    kind = getattr(layer, "attention_type", None) or (kinds[place] if kinds else None)
    if kind is None:
        code = sys.modules[type(layer).__module__]
        reads = hasattr(code, "create_sliding_window_causal_mask")
        slides = reads and getattr(config, "use_sliding_window", True) is not False
        window = getattr(config, "sliding_window", None)
        kind = "sliding_attention" if slides and window else "full_attention"
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"layer_types: expected full_attention or sliding_attention of every layer, got {kind}"
        )
    return kind


def _run(
    layers: Iterable[nn.Module], h: Tensor, arguments: list[dict[str, Any]], cache: Any
) -> Tensor:
    """h [B, S, D] through all layers -> [B, S, D]."""
    told = {} if cache is None else dict.fromkeys(_CACHE_NAMES, cache) | {"use_cache": True}
    for layer, given in zip(layers, arguments, strict=True):
        h = _tensor(layer(h, **given | {name: told[name] for name in told if name in given}))
    return h


def _tensor(output: Any) -> Tensor:
    """The first tensor of what a module returns."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


# -- the arguments of a call


def _check(config: LoopedDecoderConfig) -> None:
    """Raise ValueError for settings that have no meaning."""
    for name, low in (("prelude", 0), ("block", 1), ("coda", 0), ("total_ut_steps", 1)):
        if getattr(config, name) < low:
            raise ValueError(f"{name}: expected at least {low}, got {getattr(config, name)}")
    if config.prelude + config.block + config.coda != len(config.layers):
        raise ValueError(
            f"prelude, block, coda: expected counts that make up the {len(config.layers)} layers, "
            f"got {config.prelude} + {config.block} + {config.coda}"
        )
    choices = {
        "injection": ("none", "add", "adapter"),
        "state": ("prelude", "noise", "learned"),
        "adapter_start": (None, "state", "inputs"),
    }
    for name, known in choices.items():
        if (value := getattr(config, name)) not in known:
            expected = ", ".join(map(str, known))
            raise ValueError(f"{name}: expected one of {expected}, got {value!r}")
    if config.injection == "none" and config.state != "prelude":
        raise ValueError(
            f"injection: expected add or adapter with state {config.state!r}, got 'none'"
        )
    if config.adapter_start is not None and config.injection != "adapter":
        raise ValueError(
            f"adapter_start: expected none with injection {config.injection}, got "
            f"{config.adapter_start}"
        )


def _check_call(
    kwargs: dict[str, Any], input_ids: Tensor | None, inputs_embeds: Tensor | None
) -> None:
    """Raise TypeError, ValueError for arguments of a call that have no meaning here."""
    if unknown := sorted(set(kwargs) - _PASSED_ALONG):
        raise TypeError(f"looped decoder: unknown arguments {unknown}")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: expected False; the kernels keep no weights")
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids: expected either input_ids or inputs_embeds")


def _depth(
    config: LoopedDecoderConfig, turns: int | None, tol: float | None, tol_per: str
) -> tuple[int, float | None]:
    """How many turns a call executes at most, and the change at which a token rests; what the call
    says comes before the configuration."""
    limit = config.total_ut_steps if turns is None else turns
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"turns: expected an integer of at least 1, got {limit!r}")
    tol = config.convergence_tol if tol is None else tol
    number = isinstance(tol, (int, float)) and not isinstance(tol, bool)
    if tol is not None and not (number and tol >= 0):
        raise ValueError(f"tol: expected a number of 0 or more, got {tol!r}")
    if tol_per not in ("sequence", "token"):
        raise ValueError(f"tol_per: expected sequence or token, got {tol_per!r}")
    return limit, tol


def _positions(
    given: Tensor, past: int, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Tensor:
    """[B or 1, S]: those of a call, or those that count the real tokens; of pads, any."""
    rows, length = given.shape[:2]
    if attention_mask is not None and attention_mask.shape != (rows, past + length):
        raise ValueError(
            f"attention_mask: expected [{rows}, {past + length}] (1 on real tokens), "
            f"got {list(attention_mask.shape)}"
        )
    if position_ids is not None:
        return position_ids.view(-1, length).to(given.device)
    if attention_mask is None:
        return torch.arange(past, past + length, device=given.device)[None]
    counted = attention_mask.long().cumsum(1) - 1
    return counted.clamp_min(0)[:, past:].to(given.device)


def _documents(positions: Tensor) -> Tensor | None:
    """[B or 1, S], the number of each token's packed document; None where a row is one."""
    begins = F.pad(positions.diff(dim=1) <= 0, (1, 0))
    return begins.cumsum(1) if bool(begins.any()) else None


def _visible(
    h: Tensor,
    past: int,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    always: bool,
) -> Tensor | None:
    """[B or 1, 1, S, P + S] boolean, which tokens each one sees; None for all up to itself of a row
    without pads. A pad sees itself alone.

    Args:
        documents: [B or 1, S], the number of each token's packed document; None where a row is one.
        window: how many tokens one sees at most, itself included.
        always: give a mask where None would do.
    """
    length = h.shape[1]
    window = None if window is None or window >= past + length else window
    real = None if attention_mask is None else attention_mask.to(h.device).bool()
    real = None if real is None or bool(real.all()) else real
    plain = real is None and documents is None and window is None
    if plain and not always and (past == 0 or length == 1):
        return None
    keys = torch.arange(past + length, device=h.device)
    distance = keys[past:, None] - keys
    seen = (distance >= 0)[None]
    if window is not None:
        seen = seen & (distance < window)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :]).to(h.device)
    if real is not None:
        seen = seen & real[:, None, :] & real[:, past:, None]
        seen = seen | (distance == 0)
    return seen[:, None]


def _still(before: Tensor, after: Tensor, tol: float, pads: Tensor | None) -> Tensor:
    """[B, S] boolean: tokens that a turn changed by at most `tol`, relative to the new state; pads
    hold nobody up."""
    wide = torch.promote_types(after.dtype, torch.float32)
    change = (after.to(wide) - before.to(wide).to(after.device)).norm(dim=-1)
    still = change <= tol * after.to(wide).norm(dim=-1)
    return still if pads is None else still | pads.to(still.device)


def _placed_noise(positions: Tensor, width: int) -> Tensor:
    """Normal numbers [B or 1, S, D] in fp32 that are a function of the position alone, so that a
    token starts alike with and without a cache, beside pads and in any batch."""
    blocks, block = (positions // _NOISE_ROWS).unique(return_inverse=True)
    table = torch.cat([_noise_block(i, width) for i in blocks.tolist()])
    return table.to(positions.device)[block * _NOISE_ROWS + positions % _NOISE_ROWS]


@lru_cache(maxsize=1024)
def _noise_block(index: int, width: int) -> Tensor:
    """[64, D], drawn from a hash of the block's number."""
    digest = hashlib.blake2b(f"0/first state/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(_NOISE_ROWS, width, generator=generator, device="cpu", dtype=torch.float32)
