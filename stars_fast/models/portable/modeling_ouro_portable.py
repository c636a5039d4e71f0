"""Ouro in one file, for folders that open without the package that wrote them.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.generate(**inputs, turns=8, max_new_tokens=64)

A looped language model (Zhu et al. 2025, "Scaling Latent Reasoning via Looped Language Models",
https://arxiv.org/abs/2510.25741): all layers and the closing norm are one turn, which starts from
the state of the turn before. `turns`, `exit_at_step`, `exit_threshold` and `tol` are arguments of a
call and of `generate`; their defaults are in config.json. It needs PyTorch and transformers 5, and
is for reading and generating; stars_fast trains the same folder.

Shapes: B rows, S tokens, P tokens in the cache, D width, H heads, W width of a head, T turns.
"""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# The cache by its name in this version of transformers: `past_key_values`, later `cache`.
_MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
CACHE = "cache" if "cache" in _MASK_ARGUMENTS else "past_key_values"

# Arguments that transformers passes along to any model, and have no effect here.
_PASSED_ALONG = frozenset(
    "cache_position is_first_iteration output_attentions return_dict token_type_ids".split()
)

_DEPTH = ("turns", "exit_at_step", "exit_threshold", "tol")


class OuroConfig(PretrainedConfig):
    """Sizes and settings of an Ouro model, as its config.json has them.

    Args:
        total_ut_steps: turns (also by the name `turns`).
        early_exit_step: turn (counted from 0) whose state gives the logits; None for the last.
        early_exit_threshold: exit probability from which on a token takes the state of a turn; 1
            or None for the last turn always.
        convergence_tol: a sequence whose states change by at most this (relative, in the L2
            norm, every token) takes no further turn; None or 0 for no such stop.
        gate: "frozen", or "ignored" for an exit gate that is never evaluated.
    """

    model_type = "ouro"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache", "turns"]
    attribute_map: ClassVar[dict[str, str]] = {
        "turns": "total_ut_steps",
        "exit_at_step": "early_exit_step",
        "exit_threshold": "early_exit_threshold",
        "tol": "convergence_tol",
    }
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    def __init__(
        self,
        vocab_size: int = 49152,
        hidden_size: int = 2048,
        intermediate_size: int = 5632,
        num_hidden_layers: int = 24,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 65536,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-6,
        use_cache: bool = True,
        rope_parameters: dict[str, Any] | None = None,
        rope_theta: float | None = None,
        rope_scaling: dict[str, Any] | None = None,
        sliding_window: int | None = None,
        layer_types: list[str] | None = None,
        total_ut_steps: int = 4,
        early_exit_step: int | None = None,
        early_exit_threshold: float | None = 1.0,
        convergence_tol: float | None = None,
        gate: str = "frozen",
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        rope = dict(rope_parameters or rope_scaling or {})
        rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = 1_000_000.0 if rope_theta is None else float(rope_theta)
        self.rope_parameters = rope
        self.sliding_window = sliding_window
        self.layer_types = layer_types or ["full_attention"] * num_hidden_layers
        self.total_ut_steps = total_ut_steps
        self.early_exit_step = early_exit_step
        self.early_exit_threshold = early_exit_threshold
        self.convergence_tol = convergence_tol
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        self.gate = gate
        super().__init__(**kwargs)


class OuroCache(DynamicCache):
    """A slot of keys and values for each layer of each turn: slot `turn * layers + layer`.

    Attributes:
        turn_layers: layers of a turn.
        turns: of the calls that use it; None before the first.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.turn_layers = layers
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

    def append(
        self, k: Tensor, v: Tensor, turn: int, layer: int, goes_on: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, P + S, W] of a slot with the new ones, [B, Hkv, S, W]. Rows
        that do not go on ([B] boolean) keep those of the turn before."""
        if goes_on is not None:
            kept = self.newest(turn - 1, layer, k.shape[-2])
            rows = goes_on.to(k.device)[:, None, None, None]
            k, v = (torch.where(rows, new, old) for new, old in zip((k, v), kept, strict=True))
        return self.update(k, v, turn * self.turn_layers + layer)

    def repeat_from(self, turn: int, length: int) -> None:
        """Let turn `turn` and all later ones have the last `length` tokens of the turn before."""
        assert self.turns is not None
        for later in range(turn, self.turns):
            for layer in range(self.turn_layers):
                kept = self.newest(turn - 1, layer, length)
                self.update(*kept, later * self.turn_layers + layer)

    def newest(self, turn: int, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """The last `length` keys and values of a slot."""
        slot: Any = self.layers[turn * self.turn_layers + layer]
        return slot.keys[..., -length:, :], slot.values[..., -length:, :]


@dataclass(frozen=True)
class OuroContext:
    """All that the layers of a call share.

    Attributes:
        cos, sin: [B or 1, 1, S, W].
        masks: by kind of layer, [B or 1, 1, S, P + S] boolean, True to attend; None for the plain
            causal case. Of kernels that make their own: [B, P + S], or None without pads.
        cache: of earlier tokens, or None.
    """

    cos: Tensor
    sin: Tensor
    masks: dict[str, Tensor | None]
    cache: OuroCache | None


def eager_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Attention from its parts: q [B, H, S, W], k and v [B, Hkv, P + S, W] -> [B, S, H, W]."""
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    if mask is None:
        ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = ones.tril(k.shape[2] - q.shape[2])
    logits = (q @ k.mT * scaling).masked_fill(~mask, -torch.inf)
    weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (weights @ v).transpose(1, 2), weights


def attention_named(name: str | None) -> Any:
    """The attention function of an implementation, as every transformers 5 has it."""
    return eager_attention if name in (None, "eager") else ALL_ATTENTION_FUNCTIONS[name]


class OuroAttentionSlot(nn.Module):
    """Attention of one layer in one turn, by the implementation that the configuration names; it
    has no weights. vLLM keeps the keys and values of a slot here, by `layer_idx`."""

    def __init__(self, config: OuroConfig, layer: int, slot: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = slot
        self.is_causal = True
        self.scaling = config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        slides = config.layer_types[layer] == "sliding_attention"
        self.sliding_window = config.sliding_window if slides else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        out, _ = attention_named(self.config._attn_implementation)(
            self,
            q,
            k,
            v,
            mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return out


class OuroRMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x [B, H, S, W], tables [B or 1, 1, S, W]."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


class OuroAttention(nn.Module):
    """Causal attention with rotary positions and grouped heads, [B, S, D] -> [B, S, D]."""

    def __init__(self, config: OuroConfig, layer: int, turns: int, layers: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.kind = config.layer_types[layer]
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        slots = {
            f"turn_{t}": OuroAttentionSlot(config, layer, t * layers + layer) for t in range(turns)
        }
        self.slots = nn.ModuleDict(slots)

    def forward(
        self, x: Tensor, context: OuroContext, turn: int, goes_on: Tensor | None, **kwargs: Any
    ) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = context.cos.to(x.device), context.sin.to(x.device)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if context.cache is not None:
            k, v = context.cache.append(k, v, turn, self.layer, goes_on)
        mask = context.masks[self.kind]
        mask = None if mask is None else mask.to(x.device)
        slot = self.slots[f"turn_{turn if len(self.slots) > 1 else 0}"]
        return self.o_proj(slot(q, k, v, mask, **kwargs).reshape(*x.shape[:-1], -1))


class OuroMLP(nn.Module):
    """down(f(gate(x)) * up(x)), [B, S, D] -> [B, S, D]."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OuroDecoderLayer(nn.Module):
    """One layer of the shared block: a norm before and after attention, and so with the MLP."""

    def __init__(self, config: OuroConfig, layer: int, turns: int, layers: int) -> None:
        super().__init__()
        size = config.hidden_size, config.rms_norm_eps
        self.self_attn = OuroAttention(config, layer, turns, layers)
        self.mlp = OuroMLP(config)
        self.input_layernorm = OuroRMSNorm(*size)
        self.input_layernorm_2 = OuroRMSNorm(*size)
        self.post_attention_layernorm = OuroRMSNorm(*size)
        self.post_attention_layernorm_2 = OuroRMSNorm(*size)

    def forward(self, h: Tensor, *context: Any, **kwargs: Any) -> Tensor:
        attended = self.self_attn(self.input_layernorm(h), *context, **kwargs)
        h = h + self.input_layernorm_2(attended)
        return h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))


@dataclass
class OuroModelOutput(BaseModelOutputWithPast):
    """Attributes, besides transformers':
    last_hidden_state: [B, S, D], what the head reads.
    hidden_states: with `output_hidden_states`, (h^(0), ..., h^(T)), each [B, S, D].
    turns: [B, S] int64, turns executed for each token.
    """

    turns: Tensor | None = None


@dataclass
class OuroCausalLMOutput(CausalLMOutputWithPast):
    """Attributes, besides transformers':
    hidden_states, turns: as `OuroModelOutput`.
    """

    turns: Tensor | None = None


class OuroPreTrainedModel(PreTrainedModel):
    """The base of Ouro's classes in transformers."""

    config_class = OuroConfig
    config: OuroConfig
    base_model_prefix = "model"
    _no_split_modules = ["OuroDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, OuroRMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class OuroModel(OuroPreTrainedModel):
    """Tokens to states.

    Raises:
        ValueError: a setting of the configuration out of range.
    """

    def __init__(self, config: OuroConfig) -> None:
        _check(config)
        super().__init__(config)
        self.in_vllm = config._attn_implementation == "vllm"
        layers = _expanded_for_vllm(config) if self.in_vllm else config.num_hidden_layers
        turns = config.total_ut_steps if self.in_vllm else 1
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            OuroDecoderLayer(config, i, turns, layers) for i in range(layers)
        )
        self.norm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self._frequencies, self._rotary_scale = _rotary(config)
        self._frequencies_on: dict[Any, Tensor] = {}
        self.post_init()

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
        cache: OuroCache | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> OuroModelOutput | tuple[Any, ...]:
        """Run the turns.

        Args:
            input_ids: [B, S] integers; or inputs_embeds: [B, S, D].
            attention_mask: [B, P + S], 1 on real tokens.
            position_ids: [B or 1, S]; by default they count the real tokens. Without a mask a
                packed document begins where they fall or stay within a row.
            past_key_values: an `OuroCache`, filled by calls of as many turns; also by the name
                `cache`.
            turns: how many; by default `config.total_ut_steps`. What a call says of the turns
                comes before the exits of the configuration.
            exit_at_step: the turn, counted from 0, whose state is returned; no later turn is run.
            exit_threshold: each token takes the state of the first turn at which its probability
                of having left reaches this; all turns are run.
            tol: a sequence whose states a turn changes by at most this takes no further turn.

        Raises:
            TypeError, ValueError: an argument that is unknown or out of range, named.
        """
        return_dict = kwargs.get("return_dict") in (None, True)
        options = {name: kwargs[name] for name in kwargs if name not in _PASSED_ALONG}
        if options and not self.in_vllm:
            raise TypeError(f"Ouro: unknown arguments {sorted(options)}")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions: expected False; the kernels keep no weights")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either input_ids or inputs_embeds")
        limit, threshold = _turns_and_threshold(self.config, turns, exit_at_step, exit_threshold)
        tol = self.config.convergence_tol if tol is None else tol
        if self.in_vllm and (tol or limit > self.config.total_ut_steps):
            raise ValueError("tol: expected none in vLLM, where every token takes all turns")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if None not in (past_key_values, cache) and past_key_values is not cache:
            raise ValueError("cache: expected None when past_key_values is given, got both")
        held = self._cache(past_key_values if cache is None else cache, use_cache, limit)
        context = self._context(h, attention_mask, position_ids, held)
        if context.cache is None and held is not None:
            if use_cache:
                raise ValueError("use_cache: expected False for packed documents, got True")
            held = None
        real = None if attention_mask is None else attention_mask[:, -h.shape[1] :].bool()
        keep = (
            self.config.output_hidden_states
            if output_hidden_states is None
            else output_hidden_states
        )
        states, left, taken = [h], [], torch.full(h.shape[:2], limit, device=h.device)
        goes_on: Tensor | None = None
        for turn in range(limit):
            before = h
            for layer in self.layers:
                h = layer(h, context, turn, goes_on, **options)
            h = self.norm(h)
            if goes_on is not None:
                h = torch.where(goes_on[:, None, None], h, before)
            if keep or threshold is not None:
                states.append(h)
            if threshold is not None:
                left.append(self._log_left(h))
            if tol and turn + 1 < limit:
                still = _rests(before, h, tol, real)
                fresh = still if goes_on is None else still & goes_on
                taken[fresh.to(taken.device)] = turn + 1
                goes_on = ~still if goes_on is None else goes_on & ~still
                if not goes_on.any():
                    if held is not None:
                        held.repeat_from(turn + 1, h.shape[1])
                    break
                goes_on = None if goes_on.all() else goes_on
        if threshold is not None:
            h = _exit_states(states[1:], torch.stack(left), threshold)
        named: dict[str, Any] = {CACHE: held}
        output = OuroModelOutput(
            last_hidden_state=h, hidden_states=tuple(states) if keep else None, turns=taken, **named
        )
        return output if return_dict else output.to_tuple()

    def _log_left(self, h: Tensor) -> Tensor:
        """[B, S]: log of the probability of not leaving after the turn that gave h, in fp32 at
        least, where the probability does not saturate."""
        gate, wide = self.early_exit_gate, torch.promote_types(h.dtype, torch.float32)
        weight, bias = (p.to(h.device, wide) for p in (gate.weight, gate.bias))
        logits = F.linear(h.to(wide), weight, bias)
        return F.logsigmoid(-logits.squeeze(-1))

    def _cache(self, given: Any, use_cache: bool | None, turns: int) -> OuroCache | None:
        if given is not None and not isinstance(given, OuroCache):
            raise TypeError(
                "past_key_values: expected an OuroCache, which has a slot for each layer of each "
                f"turn, got {type(given).__name__}"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if given is None and not use_cache:
            return None
        cache = OuroCache(len(self.layers)) if given is None else given
        cache.bind(turns)
        return cache

    def _context(
        self,
        h: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: OuroCache | None,
    ) -> OuroContext:
        past, length = 0 if cache is None else cache.get_seq_length(), h.shape[1]
        if attention_mask is not None and attention_mask.shape != (len(h), past + length):
            raise ValueError(
                f"attention_mask: expected [B, {past + length}] (1 on real tokens), "
                f"got {list(attention_mask.shape)}"
            )
        documents = None
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=h.device)[None]
            if attention_mask is not None:
                counted = attention_mask.long().cumsum(1) - 1
                position_ids = counted.clamp_min(0)[:, past:].to(h.device)
        elif attention_mask is None and not self.in_vllm:
            restarts = F.pad(position_ids.diff(dim=1) <= 0, (1, 0))
            if past == 0 and bool(restarts.any()):
                documents = restarts.cumsum(1)
        kinds = set(self.config.layer_types)
        name = self.config._attn_implementation
        if name in ("sdpa", "eager", None):
            windows = {"full_attention": None, "sliding_attention": self.config.sliding_window}
            masks = {
                kind: _visible(h, past, attention_mask, documents, windows[kind]) for kind in kinds
            }
        elif documents is not None:
            raise ValueError(f"position_ids: packed documents need sdpa or eager, got {name!r}")
        else:
            masks = dict.fromkeys(kinds, attention_mask)
        wide = torch.promote_types(h.dtype, torch.float32)
        key = h.device, wide
        if key not in self._frequencies_on:
            self._frequencies_on[key] = self._frequencies.to(*key)
        angles = position_ids.to(wide)[..., None] * self._frequencies_on[key]
        angles = torch.cat((angles, angles), -1)[:, None]
        scale = self._rotary_scale
        cache = cache if documents is None else None  # it could not tell them apart later
        return OuroContext(angles.cos() * scale, angles.sin() * scale, masks, cache)


class OuroForCausalLM(OuroPreTrainedModel, GenerationMixin):
    """Ouro with its head; `turns`, `exit_at_step`, `exit_threshold` and `tol` as `OuroModel`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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
        cache: OuroCache | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> OuroCausalLMOutput | tuple[Any, ...]:
        """Logits, and the loss of the next token where labels are given.

        Args:
            labels: [B, S] int64, the token ids themselves (they are shifted here), -100 where there
                is no target.
            logits_to_keep: logits of the last so many positions, or of positions [n]; 0 for all.
            num_items_in_batch: divides the summed loss, as a Trainer asks for that accumulates
                gradients; the number of targets by default.
            turns, exit_at_step, exit_threshold, tol and the rest: as `OuroModel.forward`.

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
            exit_at_step=exit_at_step,
            exit_threshold=exit_threshold,
            tol=tol,
            cache=cache,
            output_hidden_states=output_hidden_states,
            **kwargs,
        )
        h = outputs.last_hidden_state
        kept = h
        if isinstance(logits_to_keep, Tensor):
            kept = h[:, logits_to_keep]
        elif logits_to_keep:
            kept = h[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=-100)
            if attention_mask is not None:
                targets = targets.masked_fill(~attention_mask[:, -h.shape[1] :].bool(), -100)
            if attention_mask is None and position_ids is not None:  # ends of packed documents
                ends = F.pad(position_ids.diff(dim=1) <= 0, (0, 1))
                targets = targets.masked_fill(ends.to(targets.device), -100)
            wide = torch.promote_types(h.dtype, torch.float32)
            logits = self.lm_head(h)
            found = logits.to(wide).flatten(0, 1), targets.to(logits.device).flatten()
            if num_items_in_batch is None:
                loss = F.cross_entropy(*found)
            else:
                count = torch.as_tensor(num_items_in_batch, device=logits.device)
                loss = F.cross_entropy(*found, reduction="sum") / count
        named: dict[str, Any] = {CACHE: outputs.get(CACHE)}
        output = OuroCausalLMOutput(
            loss=loss,
            logits=self.lm_head(kept),
            hidden_states=outputs.hidden_states,
            turns=outputs.turns,
            **named,
        )
        return output if return_dict in (None, True) else output.to_tuple()

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
        """As transformers', which would keep these settings and read none of them."""
        for name in _DEPTH:
            for config in (generation_config, self.generation_config):
                if getattr(config, name, None) is not None:
                    raise ValueError(
                        f"generation_config: expected no {name}, got {getattr(config, name)!r}; "
                        "give it to generate, or set it in the model's config"
                    )
        return GenerationMixin._prepare_generation_config(
            cast(Any, self), generation_config, *args, **kwargs
        )

    def _get_candidate_generator(  # type: ignore[override]
        self, generation_config: Any, *args: Any, model_kwargs: Any, **kwargs: Any
    ) -> Any:
        """Let an assistant think as deep as it says itself, or this model at fewer turns draft."""
        generation_config = copy.deepcopy(generation_config)
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
            model_kwargs[CACHE] = OuroCache(len(self.model.layers))
            return None
        return GenerationMixin._prepare_cache_for_generation(
            cast(Any, self), generation_config, model_kwargs, *args, **kwargs
        )


def _check(config: OuroConfig) -> None:
    """Raise ValueError for settings that have no meaning."""
    turns, step = config.total_ut_steps, config.early_exit_step
    if turns < 1:
        raise ValueError(f"total_ut_steps: expected at least 1, got {turns}")
    if step is not None and not 0 <= step < turns:
        raise ValueError(f"early_exit_step: expected one of the {turns} turns from 0, got {step}")
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(f"attention_dropout: expected 0, got {config.attention_dropout}")
    if set(config.layer_types) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types: expected full_attention or sliding_attention, got {config.layer_types}"
        )


def _expanded_for_vllm(config: OuroConfig) -> int:
    """Layers of a turn. vLLM gives each of `num_hidden_layers` a cache of keys and values, so that
    its copy of the configuration has to count every turn; it makes several models of one."""
    layers = getattr(config, "layers_of_a_turn", None)
    if layers is None:
        layers = config.layers_of_a_turn = config.num_hidden_layers
        config.num_hidden_layers *= config.total_ut_steps
        config.layer_types = config.layer_types * config.total_ut_steps
    return layers


def _rotary(config: OuroConfig) -> tuple[Tensor, float]:
    """Frequencies [W / 2] in fp64 on the CPU, and the factor of the tables. They are no buffer:
    nothing loads, moves or casts them."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
        return rope["rope_theta"] ** (-steps / config.head_dim), 1.0
    if rope["rope_type"] not in ("linear", "yarn", "llama3"):
        raise ValueError(
            "rope_parameters: expected rope_type default, linear, yarn or llama3, "
            f"got {rope['rope_type']!r}"
        )
    with torch.device("cpu"):
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    return frequencies.double(), scale


def _turns_and_threshold(
    config: OuroConfig, turns: int | None, exit_at_step: int | None, exit_threshold: float | None
) -> tuple[int, float | None]:
    """How many turns a call executes, and the exit probability that counts; None where the last
    turn's state is taken anyway. What the call says comes before the configuration."""
    if exit_at_step is not None and exit_threshold is not None:
        raise ValueError("exit_threshold: expected None when exit_at_step is given, got both")
    if exit_threshold is not None and not 0.0 < exit_threshold <= 1.0:
        raise ValueError(f"exit_threshold: expected a number in (0, 1], got {exit_threshold}")
    limit = config.total_ut_steps if turns is None else turns
    if limit < 1:
        raise ValueError(f"turns: expected at least 1, got {limit}")
    if exit_at_step is None and exit_threshold is None and turns is None:
        exit_at_step = config.early_exit_step
    if exit_at_step is not None:
        if not 0 <= exit_at_step < limit:
            raise ValueError(f"exit_at_step: expected less than turns={limit}, got {exit_at_step}")
        return exit_at_step + 1, None
    threshold = config.early_exit_threshold if exit_threshold is None else exit_threshold
    if threshold is None or threshold >= 1.0:
        return limit, None
    if config.gate == "ignored":
        raise ValueError("exit_threshold: expected None with gate='ignored', which has no exit")
    return limit, threshold


def _exit_states(states: list[Tensor], left: Tensor, threshold: float) -> Tensor:
    """[B, S, D]: of each token the state of the first turn at which the probability of having
    left, 1 - prod(1 - sigmoid(gate)), reaches the threshold; of the last where none does.

    Args:
        left: [T, B, S], log of each turn's probability of not leaving.
    """
    picked = states[-1]
    reached = left.cumsum(0) <= math.log1p(-threshold)
    for turn in reversed(range(len(states) - 1)):
        picked = torch.where(reached[turn].unsqueeze(-1), states[turn], picked)
    return picked


def _rests(before: Tensor, after: Tensor, tol: float, real: Tensor | None) -> Tensor:
    """[B] boolean: sequences of which a turn changed no token's state by more than `tol`, relative
    to the new state; pads hold nobody up."""
    wide = torch.promote_types(after.dtype, torch.float32)
    change = (after.to(wide) - before.to(after.device, wide)).norm(dim=-1)
    still = change <= tol * after.to(wide).norm(dim=-1)
    return (still if real is None else still | ~real.to(still.device)).all(-1)


def _visible(
    h: Tensor,
    past: int,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    window: int | None,
) -> Tensor | None:
    """[B or 1, 1, S, P + S] boolean, which tokens each one sees; None for all up to itself of a row
    without pads. A pad sees itself alone.

    Args:
        documents: [B or 1, S], the number of each token's packed document; None where a row is one.
        window: how many tokens one sees at most, itself included.
    """
    length = h.shape[1]
    window = None if window is None or window >= past + length else window
    real = None if attention_mask is None else attention_mask.to(h.device).bool()
    real = None if real is None or bool(real.all()) else real
    if real is None and documents is None and window is None and (past == 0 or length == 1):
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
