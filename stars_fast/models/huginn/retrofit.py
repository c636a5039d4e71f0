"""A decoder made recurrent: some of its layers become prelude, core and coda of a Huginn (McLeish
et al. 2025, "Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence",
https://arxiv.org/abs/2511.07384).

Weights go where convert_pretrained_model/convert_llama.py and convert_olmo.py of
https://github.com/mcleish7/retrofitting-recurrence put them; the adapter begins as [0, I], as in
convert_olmo.py of the fork LoopedLMs/retrofitting-recurrence, so that one turn over layers that
follow each other is the decoder without those left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Olmo2ForCausalLM

from stars_fast.models.huginn.causal_lm import HuginnForCausalLM
from stars_fast.models.huginn.config import HuginnConfig
from stars_fast.models.loop_keys import refuse_unread_loop

# Kind of decoder -> norm of ours: theirs.
_NORMS = {
    "llama": {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"},
    "olmo2": {
        "norm_1": "post_attention_layernorm",
        "norm_2": "post_feedforward_layernorm",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
    },
}


def retrofit(
    decoder: Any, prelude: Sequence[int], core: Sequence[int], coda: Sequence[int], turns: int = 32
) -> HuginnForCausalLM:
    """Make a decoder recurrent. Nothing is trained, and all turns say the same: as it begins, the
    adapter does not look at the state.

        # The public recurrent TinyLlama: 4 layers, 8 in the loop, 4.
        retrofit(decoder, range(4), range(10, 18), range(18, 22))

    Args:
        decoder: a `LlamaForCausalLM` or `Olmo2ForCausalLM` of transformers (TinyLlama is the
            former), without biases and of activation silu.
        prelude, core, coda: which of its layers make up each part, counted from 0.
        turns: as `HuginnConfig.mean_recurrence`.

    Returns:
        A model with weights of its own, in the decoder's dtype, on the CPU.

    Raises:
        TypeError: another kind of decoder, or layers that are no integers.
        ValueError: a setting that has no counterpart, a layer that the decoder does not have, or a
            configuration that tells of a loop which the decoder does not run.
    """
    if not isinstance(decoder, (LlamaForCausalLM, Olmo2ForCausalLM)):
        raise TypeError(
            "decoder: expected a LlamaForCausalLM or an Olmo2ForCausalLM of transformers, got "
            f"{type(decoder).__name__}"
        )
    theirs = decoder.config
    refuse_unread_loop(vars(theirs), type(theirs))
    for name, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if getattr(theirs, name, wanted) != wanted:
            raise ValueError(f"decoder: expected {name}={wanted}, got {getattr(theirs, name)!r}")
    parts = {"prelude": prelude, "core_block": core, "coda": coda}
    for name, layers in (("prelude", prelude), ("core", core), ("coda", coda)):
        if not isinstance(layers, Sequence) or not all(type(i) is int for i in layers):
            raise TypeError(f"{name}: expected a list of integers, got {layers!r}")
        for i in layers:
            if not 0 <= i < theirs.num_hidden_layers:
                raise ValueError(
                    f"{name}: expected layers of the decoder's {theirs.num_hidden_layers}, got {i}"
                )
    config = _configuration(theirs, parts, turns)
    with torch.device("meta"):
        model = HuginnForCausalLM(config)
    weights = _weights(decoder.state_dict(), theirs.model_type, parts)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(True).eval()


def _configuration(theirs: Any, parts: dict[str, Sequence[int]], turns: int) -> HuginnConfig:
    rope = dict(theirs.rope_parameters)
    width, heads = theirs.hidden_size, theirs.num_attention_heads
    config = HuginnConfig(
        n_embd=width,
        n_heads=heads,
        num_key_value_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or width // heads,
        intermediate_size=theirs.intermediate_size,
        n_layers_in_prelude=len(parts["prelude"]),
        n_layers_in_recurrent_block=len(parts["core_block"]),
        n_layers_in_coda=len(parts["coda"]),
        vocab_size=theirs.vocab_size,
        norm_eps=theirs.rms_norm_eps,
        rope_base=rope["rope_theta"],
        rope_parameters=rope,
        max_position_embeddings=theirs.max_position_embeddings,
        mean_recurrence=turns,
        tie_embeddings=False,
        qk_bias=False,
        layer_layout=theirs.model_type,
        dtype=theirs.dtype,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
    )
    config.init_values["embed_scale"] = 1.0
    return config


def _weights(
    theirs: dict[str, Tensor], kind: str, parts: dict[str, Sequence[int]]
) -> dict[str, Tensor]:
    embedding = theirs["model.embed_tokens.weight"]
    eye = torch.eye(embedding.shape[1], dtype=embedding.dtype)
    found = {
        "transformer.wte.weight": embedding,
        "transformer.ln_f.weight": theirs["model.norm.weight"],
        "transformer.adapter.weight": torch.cat((torch.zeros_like(eye), eye), 1),
        "lm_head.weight": theirs["lm_head.weight"],
    }
    for part, layers in parts.items():
        for place, i in enumerate(layers):
            old, new = f"model.layers.{i}", f"transformer.{part}.{place}"
            attention = [theirs[f"{old}.self_attn.{name}_proj.weight"] for name in "qkv"]
            found[f"{new}.attn.Wqkv.weight"] = torch.cat(attention)
            found[f"{new}.attn.proj.weight"] = theirs[f"{old}.self_attn.o_proj.weight"]
            gated = [theirs[f"{old}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
            found[f"{new}.mlp.fc.weight"] = torch.cat(gated)
            found[f"{new}.mlp.proj.weight"] = theirs[f"{old}.mlp.down_proj.weight"]
            for mine, name in _NORMS[kind].items():
                found[f"{new}.{mine}.weight"] = theirs[f"{old}.{name}.weight"]
    return {key: weight.detach().cpu().clone() for key, weight in found.items()}
