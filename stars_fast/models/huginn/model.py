"""Huginn in its parts: embedding and prelude, turns of the core, coda (Geiping et al. 2025,
"Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth Approach",
https://arxiv.org/abs/2502.05171).

    e = prelude(scale embed(tokens))
    s_0 = scale noise
    s_t = core(W [s_(t-1), e])
    logits = head(norm(coda(norm(s_T))))

Retrofitted models have no norm before the coda. The order is that of `RavenForCausalLM.forward` in
recpre/raven_modeling_minimal.py (https://github.com/seal-rg/recurrent-pretraining).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from stars_fast.dual.pass_mode import on_stacks
from stars_fast.dual.tensor import Dual
from stars_fast.models.folders import check_folder
from stars_fast.models.huginn.cache import HuginnCache
from stars_fast.models.huginn.config import HuginnConfig, check_config
from stars_fast.models.huginn.layers import FULL, LAYERS, HuginnAttention, HuginnRMSNorm
from stars_fast.models.huginn.loading import TABLE, layout_of
from stars_fast.models.huginn.rotary import HuginnRotary
from stars_fast.models.huginn.state import fresh_seeds, noise_state
from stars_fast.models.ouro.context import Context, make_context
from stars_fast.models.ouro.loading import check_keys
from stars_fast.models.plain_linear import project
from stars_fast.tokens import Tokens

_WHERE = ("subfolder", "revision", "cache_dir", "local_files_only", "token", "force_download")


class HuginnPreTrainedModel(PreTrainedModel):
    """The base of Huginn's classes in transformers: initial weights, loading, sharding."""

    config_class = HuginnConfig
    config: HuginnConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["SandwichLayer", "LlamaLayer", "Olmo2Layer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [TABLE]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', and strict.

        Raises:
            ValueError: a folder holds no whole Huginn checkpoint; keys are missing, not expected or
                of another shape; all are named.
        """
        path = pretrained_model_name_or_path
        if kwargs.keys().isdisjoint(("subfolder", "variant", "state_dict")):
            check_folder(path, (HuginnConfig.model_type,))
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.pop("trust_remote_code", None)
        kwargs["ignore_mismatched_sizes"] = True  # reported below, with the others
        config = kwargs.get("config")
        if "layer_layout" not in kwargs and getattr(config, "layer_layout", None) is None:
            where = {name: kwargs[name] for name in _WHERE if name in kwargs}
            if isinstance(config, HuginnConfig):  # as the auto classes give it
                kwargs["config"] = config = copy.deepcopy(config)
                config.layer_layout = layout_of(path, **where)
            elif PretrainedConfig.get_config_dict(path, **where)[0].get("layer_layout") is None:
                kwargs["layer_layout"] = layout_of(path, **where)
        loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        check_keys(str(path), info["missing_keys"], info["unexpected_keys"], info)
        return (model, info) if wants_info else model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Truncated normals of the configuration's `init_values`, as published: smaller ones for
        maps that end a branch, and for the half of `fc` that goes through no activation."""
        from transformers import initialization as init

        scales = self.config.init_values
        if isinstance(module, HuginnRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.Embedding):
            _truncated(module.weight, scales["embedding"])
        elif isinstance(module, nn.Linear):
            name = next(name for name, each in self.named_modules() if each is module)
            ends = name.endswith((".attn.proj", ".mlp.proj"))
            _truncated(module.weight, scales["out_proj" if ends else "std"])
            loaded = getattr(module.weight, "_is_hf_initialized", False)
            if name.endswith(".mlp.fc") and not loaded:  # which its halves would not know
                _truncated(module.weight.chunk(2)[1], scales["out_proj"])
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, HuginnAttention) and module.qk_bias is not None:
            init.zeros_(module.qk_bias)


def _truncated(weight: Tensor, std: float) -> None:
    from transformers import initialization as init

    init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


class HuginnParts(HuginnPreTrainedModel):
    """Tokens to states, and states to what the head reads."""

    def __init__(self, config: HuginnConfig) -> None:
        check_config(config)  # again: settings may have been overridden since
        super().__init__(config)
        layer = LAYERS[config.layer_layout]
        width, ends = config.n_embd, config.n_layers_in_recurrent_block
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, width),
                "prelude": nn.ModuleList(
                    layer(config, i) for i in range(-config.n_layers_in_prelude, 0)
                ),
                "adapter": nn.Linear(2 * width, width, bias=config.bias),
                "core_block": nn.ModuleList(layer(config, i) for i in range(ends)),
                "coda": nn.ModuleList(
                    layer(config, ends + i) for i in range(config.n_layers_in_coda)
                ),
                "ln_f": HuginnRMSNorm(width, config.norm_eps),
            }
        )
        self.rotary = HuginnRotary(config)
        self.gradient_checkpointing = False

    @property
    def core_layers(self) -> list[nn.Module]:
        """The layers of a turn, without its adapter."""
        return list(self.part("core_block"))

    def part(self, name: str) -> Any:
        """One of wte, prelude, adapter, core_block, coda, ln_f."""
        return self.transformer[name]

    def get_input_embeddings(self) -> nn.Module:
        return self.part("wte")

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.transformer["wte"] = value

    def prepare(
        self,
        h: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: HuginnCache | None = None,
        tokens: Tokens | None = None,
    ) -> Context:
        """The context of one call's layers, for states of h's shape, dtype and device; arguments
        and errors as `ouro.context.make_context`."""
        return make_context(
            {FULL: None},
            self.rotary,
            h,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            cache=cache,
            tokens=tokens,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [B, S] -> embeddings [B, S, D], at the scale that the prelude takes."""
        x = self.part("wte")(tokens)
        scale = self.config.init_values["embed_scale"]
        return x if scale == 1 else x * scale

    def prelude(self, x: Tensor, context: Context) -> Tensor:
        """Embeddings -> e [B, S, D], which every turn takes in."""
        for layer in self.part("prelude"):
            x = layer(x, context)
        return x

    def first_state(
        self, inputs: Tensor, context: Context, seed: Tensor | int | None = None
    ) -> Tensor:
        """s_0 [B, S, D], before the first turn.

        Noise of the configuration's `state_seed` and each token's position in its document. In
        training, samples have seeds of their own, drawn as dropout is.

        Args:
            inputs: e [B, S, D].
            seed: of all tokens, or [B, 1 or S] int64, instead of these.
        """
        config, scales = self.config, self.config.init_values
        if config.initial_state_mode == "embed-init":
            return inputs
        seeds: Tensor | int = config.state_seed if seed is None else seed
        if seed is None and self.training:
            seeds = fresh_seeds(len(inputs), inputs.device)
            if context.starts is not None:  # documents of one row have each its own
                seeds = seeds + context.starts.to(inputs.device)
        std = scales["std"] * scales["embed_scale"]
        positions = context.tokens.positions.to(inputs.device)
        return noise_state(seeds, positions, config.n_embd, std).to(inputs.dtype).expand_as(inputs)

    def turn(self, h: Tensor, inputs: Tensor, context: Context, index: int = 0) -> Tensor:
        """One turn, h [B, S, D] -> [B, S, D]; a `Dual` gives a `Dual`.

        Args:
            inputs: e [B, S, D].
            context: from `prepare`.
            index: of the turn; it matters for the cache alone.
        """
        if not isinstance(h, Dual):
            return self._core(h, inputs, context, index)
        with on_stacks():
            # A pair of this region: the one from outside would stand for its primal here.
            return self._core(Dual(h.stack), inputs, context, index)

    def _core(self, h: Tensor, inputs: Tensor, context: Context, index: int) -> Tensor:
        dtype = h.dtype
        h = project(self.part("adapter"), torch.cat((h, inputs.to(h.device)), -1)).to(dtype)
        recompute = self.recomputes
        for layer in self.part("core_block"):
            if recompute:
                h = self._gradient_checkpointing_func(layer, h, context, index)
            else:
                h = layer(h, context, index)
        return h

    def coda(self, h: Tensor, context: Context) -> Tensor:
        """The state after the last turn -> what the head reads, [B, S, D]."""
        if self.config.layer_layout in (None, "huginn"):
            h = self.part("ln_f")(h)
        for layer in self.part("coda"):
            h = layer(h, context)
        return self.part("ln_f")(h)

    @property
    def recomputes(self) -> bool:
        """Whether the layers of turns are computed again in the backward pass."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()
