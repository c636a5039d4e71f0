"""Tiny decoders of transformers with random weights, of several architectures."""

import torch
import transformers

WIDTH, VOCABULARY, LAYERS = 32, 320, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 8}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 256,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DECODERS = {
    "llama": ("Llama", "Llama", SIZES),
    "qwen3": ("Qwen3", "Qwen3", SIZES | HEADS),
    "gemma3": ("Gemma3", "Gemma3Text", SIZES | HEADS | WINDOWS | {"query_pre_attn_scalar": 8}),
    "olmo2": ("Olmo2", "Olmo2", SIZES),
    "mistral": ("Mistral", "Mistral", SIZES | HEADS | {"sliding_window": 4}),
    "gpt2": ("GPT2", "GPT2", GPT2),
}
"""Names of class and configuration, and sizes; two have sliding windows, one learned positions,
one scales its embedding."""
MORE = {
    "qwen2": ("Qwen2", "Qwen2", SIZES),
    "gemma2": ("Gemma2", "Gemma2", SIZES | HEADS | WINDOWS | {"final_logit_softcapping": 0.5}),
    "smollm3": ("SmolLM3", "SmolLM3", SIZES),
    "granite": (
        "Granite", "Granite", SIZES | {"embedding_multiplier": 3.0, "logits_scaling": 4.0},
    ),
    "cohere": ("Cohere", "Cohere", SIZES),
    "gpt_neox": (
        "GPTNeoX", "GPTNeoX", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
    ),
    "olmoe": ("Olmoe", "Olmoe", SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": ("Olmo3", "Olmo3", SIZES | WINDOWS),
    "cohere2": ("Cohere2", "Cohere2", SIZES | WINDOWS),
    "falcon": ("Falcon", "Falcon", SIZES),
    "codegen": ("CodeGen", "CodeGen", GPT2 | {"rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeo", "GPTNeo",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": 4,
         "window_size": 4, "attention_types": [[["local", "global"], 2]], "bos_token_id": 0,
         "eos_token_id": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3", "DeepseekV3",
        SIZES | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 4,
                 "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
                 "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
}  # fmt: skip
"""Those that do more to embedding, logits or cache, or have windows, or call their layers in other
ways."""


def decoder(name, dtype=torch.float64, **options):
    """A model in evaluation mode, its weights off symmetric values."""
    kind, config, sizes = (DECODERS | MORE)[name]
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    settings = getattr(transformers, f"{config}Config")(**(sizes | options))
    model = getattr(transformers, kind + head)(settings).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def tokens(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def left_padded(ids, *lengths):
    """The last so many tokens of each row are real: the rows with zeros before them, and a mask."""
    real = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]
    return ids * real, real.long()
