"""Huginn in one file, for folders that open without the package that wrote them.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.generate(**inputs, num_steps=32, max_new_tokens=64)

A depth-recurrent language model (Geiping et al. 2025, https://arxiv.org/abs/2502.05171), or a Llama
or OLMo-2 made recurrent (McLeish et al. 2025, https://arxiv.org/abs/2511.07384):

    e = prelude(scale embed(tokens))
    s_0 = scale noise
    s_t = core(W [s_(t-1), e])
    logits = head(norm(coda(norm(s_T))))

Recurrent decoders have no norm before the coda. `turns` (or `num_steps`), `tol` and `tol_per` are
arguments of a call and of `generate`; the defaults of the first two are in config.json. It needs
PyTorch and transformers 5, and is for reading and generating; stars_fast trains the same folder.

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
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# The cache by its name in this version of transformers: `past_key_values`, later `cache`.
_MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
CACHE = "cache" if "cache" in _MASK_ARGUMENTS else "past_key_values"

# Arguments that transformers passes along to any model, and have no effect here.
_PASSED_ALONG = frozenset(
    "cache_position is_first_iteration output_attentions return_dict token_type_ids".split()
)

_DEPTH = ("turns", "num_steps", "tol", "tol_per")

# Settings of which one value alone has a meaning here.
_ONLY = {
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
    "test_time_noise": 0,
}

# SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), whose
# constants are written here as signed integers, as torch has them.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)
_BOUND = 3.0  # standard deviations at which the normal is cut off


class HuginnConfig(PretrainedConfig):
    """Sizes and settings of a Huginn model, as its config.json has them.

    Args:
        n_embd, n_heads, intermediate_size: width, heads, inner width of the MLP.
        vocab_size, padded_vocab_size: tokens, and rows of embedding and head.
        mean_recurrence: turns (also by the names `turns` and `num_steps`).
        init_values: std and embed_scale, whose product scales the initial states; the latter is
            also the factor on embeddings.
        initial_state_mode: random, or embed-init for the prelude's output.
        state_seed: of the random initial state outside training.
        layer_layout: huginn, llama or olmo2.
        rope_base: of the rotary frequencies, in the layout huginn.
        rope_theta, rope_scaling: the same in the other layouts, as Llama's.
        convergence_tol: a sequence whose states change by at most this (relative, in the L2
            norm, every token) takes no further turn; None or 0 for no such stop.
    """

    model_type = "huginn_raven"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values", "cache", "turns", "inputs", "last_hidden_state",
    ]  # fmt: skip
    attribute_map: ClassVar[dict[str, str]] = {
        "num_attention_heads": "n_heads",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layers",
        "turns": "mean_recurrence",
        "num_steps": "mean_recurrence",
        "tol": "convergence_tol",
    }

    def __init__(
        self,
        n_embd: int = 5280,
        n_heads: int = 55,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int = 17920,
        n_layers: int | None = None,
        n_layers_in_prelude: int = 2,
        n_layers_in_recurrent_block: int = 4,
        n_layers_in_coda: int = 2,
        block_size: int = 4096,
        max_position_embeddings: int | None = None,
        vocab_size: int = 65536,
        padded_vocab_size: int | None = None,
        tie_embeddings: bool = True,
        bias: bool = False,
        qk_bias: bool = True,
        norm_eps: float = 1e-6,
        rope_base: float = 50_000,
        rope_theta: float | None = None,
        rope_scaling: dict[str, Any] | None = None,
        mean_recurrence: int = 32,
        init_values: dict[str, float] | None = None,
        initial_state_mode: str = "random",
        state_seed: int = 0,
        layer_layout: str | None = None,
        convergence_tol: float | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.n_embd = n_embd
        self.n_heads = n_heads
        self.num_key_value_heads = num_key_value_heads or n_heads
        self.head_dim = head_dim or n_embd // n_heads
        self.intermediate_size = intermediate_size
        self.n_layers_in_prelude = n_layers_in_prelude
        self.n_layers_in_recurrent_block = n_layers_in_recurrent_block
        self.n_layers_in_coda = n_layers_in_coda
        ends = n_layers_in_prelude + n_layers_in_coda
        self.n_layers = n_layers or ends + n_layers_in_recurrent_block
        self.block_size = block_size
        self.max_position_embeddings = max_position_embeddings or block_size
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size or vocab_size
        self.tie_embeddings = tie_embeddings
        self.bias = bias
        self.qk_bias = qk_bias
        self.norm_eps = norm_eps
        self.rope_base = rope_base
        rope = dict(kwargs.pop("rope_parameters", None) or rope_scaling or {})
        rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = float(rope_base if rope_theta is None else rope_theta)
        self.rope_parameters = rope
        self.mean_recurrence = mean_recurrence
        std = math.sqrt(2 / (5 * n_embd))
        self.init_values = init_values or {"std": std, "embed_scale": math.sqrt(n_embd)}
        self.initial_state_mode = initial_state_mode
        self.state_seed = state_seed
        self.layer_layout = layer_layout
        self.convergence_tol = convergence_tol
        self.use_cache = use_cache
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        kwargs["tie_word_embeddings"] = tie_embeddings
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # read of any configuration
            kwargs.setdefault(name, None)
        super().__init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the public format, which other readers of this folder know."""
        values = super().to_dict()
        rope = {"rope_theta": values.pop("rope_parameters")["rope_theta"]}
        values.pop("tie_word_embeddings", None)
        if self.layer_layout in ("llama", "olmo2"):
            values |= rope
            if self.rope_parameters["rope_type"] != "default":
                scaling = {k: v for k, v in self.rope_parameters.items() if k not in rope}
                values["rope_scaling"] = scaling
        return values


class HuginnCache(DynamicCache):
    """Slots of keys and values in the order in which a call fills them: one for each layer of the
    prelude, of each turn of the core, and of the coda.

    Args:
        prelude: its layers.
        core: layers of a turn.

    Attributes:
        turns: of the calls that use it; None before the first.
    """

    def __init__(self, prelude: int, core: int) -> None:
        super().__init__()
        self.prelude = prelude
        self.core = core
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

    def slot(self, turn: int, layer: int) -> int:
        """The slot of a layer: `layer` counts on from the core into the coda, and back from it into
        the prelude, whose last layer is -1; `turn` matters in the core alone."""
        if layer < 0:
            turn = 0
        elif layer >= self.core:
            assert self.turns is not None
            turn = self.turns - 1
        return self.prelude + turn * self.core + layer

    def append(
        self, k: Tensor, v: Tensor, turn: int, layer: int, goes_on: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, P + S, W] of a slot with the new ones, [B, Hkv, S, W]. Rows
        that do not go on ([B] boolean) keep those of the turn before."""
        if goes_on is not None:
            kept = self.newest(turn - 1, layer, k.shape[-2])
            rows = goes_on.to(k.device)[:, None, None, None]
            k, v = (torch.where(rows, new, old) for new, old in zip((k, v), kept, strict=True))
        return self.update(k, v, self.slot(turn, layer))

    def repeat_from(self, turn: int, length: int) -> None:
        """Let turn `turn` and all later ones have the last `length` tokens of the turn before."""
        assert self.turns is not None
        for later in range(turn, self.turns):
            for layer in range(self.core):
                self.update(*self.newest(turn - 1, layer, length), self.slot(later, layer))

    def newest(self, turn: int, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """The last `length` keys and values of a slot."""
        slot: Any = self.layers[self.slot(turn, layer)]
        return slot.keys[..., -length:, :], slot.values[..., -length:, :]


@dataclass(frozen=True)
class HuginnContext:
    """All that the layers of a call share.

    Attributes:
        positions: [B or 1, S] int64.
        cos, sin: [B or 1, 1, S, W].
        mask: [B or 1, 1, S, P + S] boolean, True to attend; None for the plain causal case. As it
            was given for kinds of attention of others.
        documents: [B or 1, S], the number of each token's packed document; None where a row is one.
        cache: of earlier tokens, or None.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    documents: Tensor | None
    cache: HuginnCache | None


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


class HuginnRMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class HuginnAttention(nn.Module):
    """Causal attention with rotary positions, [B, S, D] -> [B, S, D].

    Huginn turns neighbouring entries of a head, 2j and 2j + 1, by the j-th angle; the others turn j
    and j + W / 2. Queries and keys are brought into the latter order first, which changes no
    product of the two.
    """

    def __init__(self, config: HuginnConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.is_causal = True
        self.scaling = config.head_dim**-0.5
        self.num_key_value_groups = config.n_heads // config.num_key_value_heads
        kv = config.num_key_value_heads * config.head_dim
        self.widths = [config.n_heads * config.head_dim, kv, kv]
        self.in_pairs = config.layer_layout in (None, "huginn")
        self.Wqkv = nn.Linear(config.n_embd, sum(self.widths), bias=False)
        if config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, config.n_heads, config.head_dim))
        if config.layer_layout == "olmo2":
            self.q_norm = HuginnRMSNorm(self.widths[0], config.norm_eps)
            self.k_norm = HuginnRMSNorm(self.widths[1], config.norm_eps)
        self.proj = nn.Linear(self.widths[0], config.n_embd, bias=False)

    def forward(
        self, x: Tensor, context: HuginnContext, turn: int = 0, goes_on: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.Wqkv(x).split(self.widths, -1)
        if self.config.layer_layout == "olmo2":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.qk_bias:
            q_bias, k_bias = self.qk_bias.to(q.dtype).flatten(1)
            q, k = q + q_bias, k + k_bias
        q, k, v = (y.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for y in (q, k, v))
        q, k = self._turned(q, context), self._turned(k, context)
        if context.cache is not None:
            k, v = context.cache.append(k, v, turn, self.layer_idx, goes_on)
        mask = None if context.mask is None else context.mask.to(x.device)
        attend = attention_named(self.config._attn_implementation)
        out, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling)
        return self.proj(out.reshape(*x.shape[:-1], -1))

    def _turned(self, x: Tensor, context: HuginnContext) -> Tensor:
        """[B, H, S, W], turned by the tokens' positions."""
        if self.in_pairs:
            x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        left, right = x.chunk(2, -1)
        cos, sin = context.cos.to(x.device), context.sin.to(x.device)
        return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


class HuginnMLP(nn.Module):
    """proj(silu(g) * u), (g, u) = fc(x), [B, S, D] -> [B, S, D]."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        g, u = self.fc(x).chunk(2, -1)
        return self.proj(F.silu(g) * u)


class HuginnLayer(nn.Module):
    """A layer, h [B, S, D] -> [B, S, D]. N_i are norms, A is attention, M the MLP:

        huginn   h = N2(h + A(N1(h)))      h = N4(h + M(N3(h)))
        llama    h = h + A(N1(h))          h = h + M(N2(h))
        olmo2    h = h + N1(A(h))          h = h + N2(M(h))

    Args:
        layer: its place: 0, 1, ... in the core and on into the coda, -1, -2, ... back into the
            prelude. It matters for the cache alone.
    """

    def __init__(self, config: HuginnConfig, layer: int) -> None:
        super().__init__()
        self.layout = config.layer_layout or "huginn"
        self.attn = HuginnAttention(config, layer)
        self.mlp = HuginnMLP(config)
        self.norm_1 = HuginnRMSNorm(config.n_embd, config.norm_eps)
        self.norm_2 = HuginnRMSNorm(config.n_embd, config.norm_eps)
        if self.layout == "huginn":
            self.norm_3 = HuginnRMSNorm(config.n_embd, config.norm_eps)
            self.norm_4 = HuginnRMSNorm(config.n_embd, config.norm_eps)

    def forward(self, h: Tensor, *context: Any) -> Tensor:
        if self.layout == "olmo2":
            h = h + self.norm_1(self.attn(h, *context))
            return h + self.norm_2(self.mlp(h))
        h = h + self.attn(self.norm_1(h), *context)
        if self.layout == "llama":
            return h + self.mlp(self.norm_2(h))
        h = self.norm_2(h)
        return self.norm_4(h + self.mlp(self.norm_3(h)))


@dataclass
class HuginnCausalLMOutput(CausalLMOutputWithPast):
    """Attributes, besides transformers':
    hidden_states: with `output_hidden_states`, (s_0, ..., s_T), each [B, S, D].
    last_hidden_state: [B, S, D], what the head reads.
    inputs: [B, S, D], the prelude's output, which every turn takes in.
    turns: [B, S] int64, turns executed for each token.
    """

    last_hidden_state: Tensor | None = None
    inputs: Tensor | None = None
    turns: Tensor | None = None


class HuginnForCausalLM(PreTrainedModel, GenerationMixin):
    """Huginn with its head.

    Outside training a token's initial state follows from `config.state_seed` and its position.

    Raises:
        ValueError: a setting of the configuration out of range.
    """

    config_class = HuginnConfig
    config: HuginnConfig
    base_model_prefix = ""
    _no_split_modules = ["HuginnLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = ["freqs_cis"]  # noqa: RUF012 (made of the configuration)
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: HuginnConfig) -> None:
        _check(config)
        super().__init__(config)
        width, core = config.n_embd, config.n_layers_in_recurrent_block
        places = {
            "prelude": range(-config.n_layers_in_prelude, 0),
            "core_block": range(core),
            "coda": range(core, core + config.n_layers_in_coda),
        }
        parts: dict[str, nn.Module] = {
            name: nn.ModuleList(HuginnLayer(config, i) for i in layers)
            for name, layers in places.items()
        }
        parts["wte"] = nn.Embedding(config.padded_vocab_size, width)
        parts["adapter"] = nn.Linear(2 * width, width, bias=config.bias)
        parts["ln_f"] = HuginnRMSNorm(width, config.norm_eps)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(width, config.padded_vocab_size, bias=False)
        self._frequencies = _frequencies(config)
        self._frequencies_on: dict[Any, Tensor] = {}
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.init_values["std"])
        elif isinstance(module, HuginnRMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, HuginnAttention) and self.config.qk_bias:
            nn.init.zeros_(module.qk_bias)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer["wte"]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.transformer["wte"] = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'; the rows of the embedding are `padded_vocab_size` in this format."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.padded_vocab_size = embeddings.num_embeddings
        return embeddings

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
        num_steps: int | Tensor | None = None,
        tol: float | None = None,
        tol_per: str = "sequence",
        cache: HuginnCache | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> HuginnCausalLMOutput | tuple[Any, ...]:
        """Logits, and the loss of the next token where labels are given.

        Args:
            input_ids: [B, S] integers; or inputs_embeds: [B, S, D], to be scaled by `embed_scale`.
            attention_mask: [B, P + S], 1 on real tokens.
            position_ids: [B or 1, S]; by default they count the real tokens. Without a mask a
                packed document begins where they fall or stay within a row.
            past_key_values: a `HuginnCache`, filled by calls of as many turns; also by the name
                `cache`.
            input_states: [B, S, D], s_0, in place of the model's own.
            labels: [B, S] int64, the token ids themselves (they are shifted here), -100 where there
                is no target.
            logits_to_keep: logits of the last so many positions, or of positions [n]; 0 for all.
            turns: how many; by default `config.mean_recurrence`.
            num_steps: the same by the public name.
            tol: a sequence all of whose (new) tokens changed by at most this, relative, in a turn
                takes no further turn. 0 for no such stop.
            tol_per: "sequence", or "token": then a token that rests keeps its state while others of
                its sequence go on.
            num_items_in_batch: divides the summed loss, as a Trainer asks for that accumulates
                gradients; the number of targets by default.

        Raises:
            TypeError, ValueError: an argument that is unknown or out of range, named.
        """
        if unknown := sorted(kwargs.keys() - _PASSED_ALONG):
            raise TypeError(f"Huginn: unknown arguments {unknown}")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions: expected False; the kernels keep no weights")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either input_ids or inputs_embeds")
        config, part = self.config, self.transformer
        limit = _turns(config, turns, num_steps)
        tol = config.convergence_tol if tol is None else tol
        if tol_per not in ("sequence", "token"):
            raise ValueError(f"tol_per: expected 'sequence' or 'token', got {tol_per!r}")
        x = part["wte"](input_ids) if inputs_embeds is None else inputs_embeds
        x = x * config.init_values["embed_scale"]
        if None not in (past_key_values, cache) and past_key_values is not cache:
            raise ValueError("cache: expected None when past_key_values is given, got both")
        held = self._cache(past_key_values if cache is None else cache, use_cache, limit)
        context = self._context(x, attention_mask, position_ids, held)
        if context.cache is None and held is not None:
            if use_cache:
                raise ValueError("use_cache: expected False for packed documents, got True")
            held = None
        for layer in cast(nn.ModuleList, part["prelude"]):
            x = layer(x, context)
        h = self._first_state(x, context) if input_states is None else input_states
        if h.shape != x.shape:
            raise ValueError(f"input_states: expected {list(x.shape)}, got {list(h.shape)}")
        real = None if attention_mask is None else attention_mask[:, -x.shape[1] :].bool()
        keep = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states, taken = [h], torch.full(h.shape[:2], limit, device=h.device)
        resting: Tensor | None = None  # [B, S]
        goes_on: Tensor | None = None  # [B]
        for turn in range(limit):
            before = h
            h = part["adapter"](torch.cat((h, x.to(h.device)), -1)).to(h.dtype)
            for layer in cast(nn.ModuleList, part["core_block"]):
                h = layer(h, context, turn, goes_on)
            before = before.to(h.device)
            if resting is not None:
                h = torch.where(resting.to(h.device).unsqueeze(-1), before, h)
            if keep:
                states.append(h)
            if tol and turn + 1 < limit:
                still = _rests(before, h, tol, real)
                done = still.all(-1)
                if tol_per == "sequence":
                    still = done.unsqueeze(-1).expand_as(still)
                fresh = still if resting is None else still & ~resting.to(still.device)
                taken[fresh.to(taken.device)] = turn + 1
                resting = still
                if done.all():
                    if held is not None:
                        held.repeat_from(turn + 1, h.shape[1])
                    break
                goes_on = ~done if done.any() else None
        out = part["ln_f"](h) if config.layer_layout in (None, "huginn") else h
        for layer in cast(nn.ModuleList, part["coda"]):
            out = layer(out, context)
        out = part["ln_f"](out)
        kept = out
        if isinstance(logits_to_keep, Tensor):
            kept = out[:, logits_to_keep]
        elif logits_to_keep:
            kept = out[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            targets = _next_tokens(labels, real, context.documents)
            wide = torch.promote_types(out.dtype, torch.float32)
            logits = self.lm_head(out)
            found = logits.to(wide).flatten(0, 1), targets.to(logits.device).flatten()
            if num_items_in_batch is None:
                loss = F.cross_entropy(*found)
            else:
                count = torch.as_tensor(num_items_in_batch, device=logits.device)
                loss = F.cross_entropy(*found, reduction="sum") / count
        named: dict[str, Any] = {CACHE: held}
        output = HuginnCausalLMOutput(
            loss=loss,
            logits=self.lm_head(kept),
            hidden_states=tuple(states) if keep else None,
            last_hidden_state=out,
            inputs=x,
            turns=taken,
            **named,
        )
        return output if return_dict in (None, True) else output.to_tuple()

    def _first_state(self, inputs: Tensor, context: HuginnContext) -> Tensor:
        """s_0 [B, S, D]: noise of the configuration's seed and the tokens' positions; in training
        of seeds of their own, from torch's generator."""
        config, scales = self.config, self.config.init_values
        if config.initial_state_mode == "embed-init":
            return inputs
        positions = context.positions.to(inputs.device)
        seed = torch.tensor(config.state_seed, device=inputs.device)
        if self.training:
            seed = torch.randint(2**62, (len(inputs), 1), device=inputs.device)
        std = scales["std"] * scales["embed_scale"]
        return _noise(seed, positions, config.n_embd, std).to(inputs.dtype).expand_as(inputs)

    def _cache(self, given: Any, use_cache: bool | None, turns: int) -> HuginnCache | None:
        if given is not None and not isinstance(given, HuginnCache):
            raise TypeError(
                "past_key_values: expected a HuginnCache, which has a slot for each layer of each "
                f"turn, got {type(given).__name__}"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if given is None and not use_cache:
            return None
        cache = self._empty_cache() if given is None else given
        cache.bind(turns)
        return cache

    def _empty_cache(self) -> HuginnCache:
        config = self.config
        return HuginnCache(config.n_layers_in_prelude, config.n_layers_in_recurrent_block)

    def _context(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: HuginnCache | None,
    ) -> HuginnContext:
        past, length = 0 if cache is None else cache.get_seq_length(), x.shape[1]
        if attention_mask is not None and attention_mask.shape != (len(x), past + length):
            raise ValueError(
                f"attention_mask: expected [B, {past + length}] (1 on real tokens), "
                f"got {list(attention_mask.shape)}"
            )
        documents = None
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=x.device)[None]
            if attention_mask is not None:
                counted = attention_mask.long().cumsum(1) - 1
                position_ids = counted.clamp_min(0)[:, past:].to(x.device)
        elif attention_mask is None and past == 0:
            restarts = F.pad(position_ids.diff(dim=1) <= 0, (1, 0))
            documents = restarts.cumsum(1) if bool(restarts.any()) else None
        name = self.config._attn_implementation
        mask = attention_mask
        if name in ("sdpa", "eager", None):
            mask = _visible(x, past, attention_mask, documents)
        elif documents is not None:
            raise ValueError(f"position_ids: packed documents need sdpa or eager, got {name!r}")
        wide = torch.promote_types(x.dtype, torch.float32)
        key = x.device, wide
        if key not in self._frequencies_on:
            self._frequencies_on[key] = self._frequencies.to(*key)
        angles = position_ids.to(wide)[..., None] * self._frequencies_on[key]
        angles = torch.cat((angles, angles), -1)[:, None]
        cache = cache if documents is None else None  # it could not tell them apart later
        return HuginnContext(position_ids, angles.cos(), angles.sin(), mask, documents, cache)

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
            model_kwargs[CACHE] = self._empty_cache()
            return None
        return GenerationMixin._prepare_cache_for_generation(
            cast(Any, self), generation_config, model_kwargs, *args, **kwargs
        )


def _check(config: HuginnConfig) -> None:
    """Raise ValueError for settings that have no meaning."""
    choices = {
        "layer_layout": (None, "huginn", "llama", "olmo2"),
        "initial_state_mode": ("random", "embed-init"),
    }
    for name, values in choices.items():
        if getattr(config, name) not in values:
            raise ValueError(f"{name}: expected one of {values}, got {getattr(config, name)!r}")
    for name, value in _ONLY.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"{name}: expected {value!r}, got {getattr(config, name)!r}")
    _turns(config, None, None)


def _turns(config: HuginnConfig, turns: int | None, num_steps: int | Tensor | None) -> int:
    """How many turns a call executes at most."""
    if turns is not None and num_steps is not None:
        raise ValueError("num_steps: expected None when turns is given, got both")
    limit: Any = num_steps if turns is None else turns
    if isinstance(limit, Tensor):
        limit = limit.tolist()
    limit = config.mean_recurrence if limit is None else limit
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"turns: expected an integer of at least 1, got {limit!r}")
    return limit


def _frequencies(config: HuginnConfig) -> Tensor:
    """Rotary frequencies [W / 2] in fp64 on the CPU. They are no buffer: nothing loads, moves or
    casts them. llama3: waves that turn less than `low_freq_factor` times in the length of the first
    training are stretched by `factor`, those of more than `high_freq_factor` turns are not, those
    between are blended linearly."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.layer_layout in ("llama", "olmo2"):
        rope = config.rope_parameters
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
    theta = rope["rope_theta"] ** (-steps / config.head_dim)
    if rope["rope_type"] == "default":
        return theta
    if rope["rope_type"] == "linear":
        return theta / rope["factor"]
    if rope["rope_type"] != "llama3":
        raise ValueError(
            f"rope_scaling: expected rope_type default, linear or llama3, got {rope['rope_type']!r}"
        )
    turns = rope["original_max_position_embeddings"] * theta / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * theta + (1 - kept) * theta / rope["factor"]


def _noise(seed: Tensor, positions: Tensor, width: int, std: float) -> Tensor:
    """Truncated-normal noise [B, S, width] fp64, made of a hash of seed, position and column: a
    token has the same whatever stands beside it.

    Args:
        seed: int64, scalar or [B, 1].
        positions: [B or 1, S] int64.
        std: of the normal before it is cut off.
    """
    rows = _hash(seed + _STEP * (positions + 1))
    column = torch.arange(1, width + 1, device=positions.device)
    bits = _hash(rows.unsqueeze(-1) + _STEP * column)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    inside = math.erf(_BOUND / math.sqrt(2))  # P(|z| <= 3)
    return torch.erfinv((2 * uniform - 1) * inside) * (math.sqrt(2) * std)


def _hash(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, on int64 that wrap around."""
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by, of x without its sign."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _rests(before: Tensor, after: Tensor, tol: float, real: Tensor | None) -> Tensor:
    """[B, S] boolean: tokens whose state a turn changed by no more than `tol`, relative to the new
    state; pads rest."""
    wide = torch.promote_types(after.dtype, torch.float32)
    change = (after.to(wide) - before.to(wide)).norm(dim=-1)
    still = change <= tol * after.to(wide).norm(dim=-1)
    return still if real is None else still | ~real.to(still.device)


def _next_tokens(labels: Tensor, real: Tensor | None, documents: Tensor | None) -> Tensor:
    """[B, S]: of each position the token that follows it; -100 on pads and at the end of each
    document.

    Args:
        real: [B, S] boolean, False on pads.
        documents: [B or 1, S], the number of each token's packed document; None where a row is one.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    if real is not None:
        targets = targets.masked_fill(~real.to(labels.device), -100)
    if documents is not None:
        ends = F.pad(documents.diff(dim=1) != 0, (0, 1), value=True)
        targets = targets.masked_fill(ends.to(labels.device), -100)
    return targets


def _visible(
    x: Tensor, past: int, attention_mask: Tensor | None, documents: Tensor | None
) -> Tensor | None:
    """[B or 1, 1, S, P + S] boolean, which tokens each one sees; None for all up to itself of a row
    without pads. A pad sees itself alone.

    Args:
        documents: [B or 1, S], the number of each token's packed document; None where a row is one.
    """
    length = x.shape[1]
    real = None if attention_mask is None else attention_mask.to(x.device).bool()
    real = None if real is None or bool(real.all()) else real
    if real is None and documents is None and (past == 0 or length == 1):
        return None
    keys = torch.arange(past + length, device=x.device)
    distance = keys[past:, None] - keys
    seen = (distance >= 0)[None]
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :]).to(x.device)
    if real is not None:
        seen = seen & real[:, None, :] & real[:, past:, None]
        seen = seen | (distance == 0)
    return seen[:, None]
