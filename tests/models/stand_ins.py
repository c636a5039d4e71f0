"""Small models with the public interfaces (names and call signatures) of three that are loaded by
remote code, written for these tests."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.7, 1.3, width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        r = torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (hidden_states * r)


# -- Ouro: decoder layers called by name, a closing norm in every turn


def turned(x):
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


class OuroMLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OuroAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.head_dim = config, config.hidden_size // config.num_attention_heads
        width, kv_width = config.hidden_size, config.num_key_value_heads * self.head_dim
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(width, kv_width, bias=False) for _ in range(2))

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_value, **kwargs):
        assert past_key_value is None
        q, k, v = (
            part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if self.config._attn_implementation == "eager":
            logits = q @ k.mT * self.head_dim**-0.5 + attention_mask
            out = logits.softmax(-1) @ v
        else:
            causal = attention_mask is None
            out = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=causal)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class OuroLayer(nn.Module):
    def __init__(self, config, index, as_tuple):
        super().__init__()
        width = config.hidden_size
        self.self_attn, self.mlp = OuroAttention(config), OuroMLP(width, 24)
        self.input_layernorm, self.input_layernorm_2 = Norm(width), Norm(width)
        self.post_attention_layernorm, self.post_attention_layernorm_2 = Norm(width), Norm(width)
        self.attention_type, self.as_tuple = config.layer_types[index], as_tuple

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_value=None,
        use_cache=False,
        cache_position=None,
        position_embeddings=None,
        **kwargs,
    ):
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        h = hidden_states + self.input_layernorm_2(attended)
        h = h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))
        return (h,) if self.as_tuple else h


class OuroRotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        steps = torch.arange(0, width, 2, dtype=torch.float64)
        self.register_buffer("inv_freq", 100.0 ** -(steps / width), persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[..., None] * self.inv_freq
        angles = torch.cat((angles, angles), -1).to(x.dtype)
        return angles.cos(), angles.sin()


class OuroModel(nn.Module):
    def __init__(self, config, as_tuple):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(11, config.hidden_size)
        count = config.num_hidden_layers
        self.layers = nn.ModuleList(OuroLayer(config, i, as_tuple) for i in range(count))
        self.norm = Norm(config.hidden_size)
        self.rotary_emb = OuroRotary(config.hidden_size // config.num_attention_heads)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
        """One turn at the positions 0, 1, ... under dense masks [B, 1, S, S] of each kind."""
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = torch.arange(h.shape[1])[None]
        tables = self.rotary_emb(h, positions)
        for layer in self.layers:
            h = layer(
                h,
                attention_mask=attention_mask[layer.attention_type],
                position_ids=positions,
                past_key_value=None,
                use_cache=False,
                cache_position=positions[0],
                position_embeddings=tables,
                current_ut=0,
            )
            h = h[0] if layer.as_tuple else h
        return self.norm(h)


class OuroForCausalLM(nn.Module):
    def __init__(self, attention="sdpa", as_tuple=False, window=3):
        super().__init__()
        self.config = SimpleNamespace(
            model_type="ouro",
            hidden_size=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=window,
            _attn_implementation=attention,
        )
        self.model = OuroModel(self.config, as_tuple)
        self.lm_head = nn.Linear(16, 11, bias=False)

    def forward(self, input_ids, attention_mask=None):
        return self.lm_head(self.model(input_ids, attention_mask))


# -- Nanbeige: a decoder of Llama's shape that loops itself, positions turned inside attention


class NanbeigeAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self.head_dim, self.rotary_emb = dim, OuroRotary(dim)
        inner, kv_width = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.q_proj, self.o_proj = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )
        self.k_proj, self.v_proj = (nn.Linear(width, kv_width, bias=False) for _ in range(2))

    def forward(self, hidden_states, attention_mask=None, position_ids=None, **kwargs):
        q, k, v = (
            part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *self.rotary_emb(v, position_ids))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        causal = attention_mask is None
        out = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=causal)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None, None


class NanbeigeDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = NanbeigeAttention(config), OuroMLP(config.hidden_size, 24)
        self.input_layernorm = Norm(config.hidden_size, 1e-5)
        self.post_attention_layernorm = Norm(config.hidden_size, 1e-5)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_value=None,
        output_attentions=False,
        use_cache=False,
        cache_position=None,
        loop_idx=0,
        loop_cache_layer_idx=None,
        **kwargs,
    ):
        attended, _, _ = self.self_attn(
            self.input_layernorm(hidden_states), attention_mask, position_ids, **kwargs
        )
        h = hidden_states + attended
        return (h + self.mlp(self.post_attention_layernorm(h)),)


class NanbeigeModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(11, config.hidden_size)
        count = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(NanbeigeDecoderLayer(config) for _ in count)
        self.norm = Norm(config.hidden_size, 1e-5)

    def forward(self, input_ids):
        """[B, S] -> [B, S, D], what the head reads: the loop, written out."""
        h = self.embed_tokens(input_ids)
        positions = torch.arange(h.shape[1])[None]
        for loop in range(self.config.num_loops):
            for layer in self.layers:
                (h,) = layer(h, position_ids=positions, loop_idx=loop)
            if not self.config.skip_loop_final_norm:
                h = self.norm(h)
        return self.norm(h) if self.config.skip_loop_final_norm else h


class NanbeigeForCausalLM(nn.Module):
    """The keys of Nanbeige4.2-3B's configuration that matter here, with their values where they
    are no sizes."""

    def __init__(self, **options):
        super().__init__()
        settings = {
            "model_type": "nanbeige",
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,  # not hidden_size / num_attention_heads
            "num_hidden_layers": 3,
            "num_loops": 2,
            "loop_loss_weights": [],
            "skip_loop_final_norm": False,
            "enable_double_loop_split": False,
            "loop_middle_layers": None,
            "loop_share_kv": False,
            "enable_hyper_connection": False,
            "enable_depth_attention": False,
            "insert_ngram_layer_idx": [],
            "ngram_insert_all_layers": False,
            "_attn_implementation": "sdpa",
        }
        self.config = SimpleNamespace(**settings | options)
        self.model = NanbeigeModel(self.config)
        self.lm_head = nn.Linear(16, 11, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.model(input_ids))


# -- Huginn: an adapter that injects the input, sandwich layers called by position


def rotate_pairs(q, k, freqs_cis):
    """Pairs of neighbours turned by real tables [1, S, 1, d/2, 2] or complex ones [1, S, 1, d/2]"""

    def one(x):
        pairs = x.unflatten(-1, (-1, 2))
        if freqs_cis.is_complex():
            return torch.view_as_real(torch.view_as_complex(pairs) * freqs_cis).flatten(3)
        a, b = pairs[..., 0], pairs[..., 1]
        cos, sin = freqs_cis[..., 0], freqs_cis[..., 1]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(3)

    return one(q), one(k)


class RavenAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(width, 3 * width, bias=False)
        self.qk_bias = nn.Parameter(torch.randn(2, 1, heads, width // heads))
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x, freqs_cis, step_idx, mask=None, past_key_values=None):
        assert mask is None
        assert past_key_values is None
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.Wqkv(x).chunk(3, -1))
        q_bias, k_bias = self.qk_bias.split(1)
        q, k = rotate_pairs(q + q_bias, k + k_bias, freqs_cis)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class RavenMLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.fc = nn.Linear(width, 2 * inner, bias=False)
        self.proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, -1)
        return self.proj(F.silu(gate) * up)


class SandwichBlock(nn.Module):
    def __init__(self, width, heads, as_tuple):
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (Norm(width) for _ in range(4))
        self.attn, self.mlp, self.as_tuple = (
            RavenAttention(width, heads),
            RavenMLP(width, 24),
            as_tuple,
        )

    def forward(self, x, freqs_cis, step_idx, mask=None, past_key_values=None):
        x = self.norm_2(x + self.attn(self.norm_1(x), freqs_cis, step_idx, mask, past_key_values))
        x = self.norm_4(x + self.mlp(self.norm_3(x)))
        return (x, None) if self.as_tuple else x


class RavenForCausalLM(nn.Module):
    def __init__(self, as_tuple=False, complex_tables=False, width=16, heads=4, longest=8):
        super().__init__()
        self.config = SimpleNamespace(model_type="huginn_raven", test_time_noise=0)
        layers = [SandwichBlock(width, heads, as_tuple) for _ in range(4)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, width),
                "prelude": nn.ModuleList(layers[:1]),
                "adapter": nn.Linear(2 * width, width),
                "core_block": nn.ModuleList(layers[1:3]),
                "coda": nn.ModuleList(layers[3:]),
                "ln_f": Norm(width),
            }
        )
        self.lm_head = nn.Linear(width, 11, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(longest), 50.0 ** -(torch.arange(half) / half)).double()
        tables = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        tables = tables if complex_tables else torch.view_as_real(tables)
        self.register_buffer("freqs_cis", tables)

    def forward(self, input_ids, attention_mask=None, num_steps=None):
        raise NotImplementedError

    def core_block_forward(self, x, input_embeds, freqs_cis, mask, past_key_values, block_idx):
        x = self.transformer.adapter(torch.cat([x, input_embeds], dim=-1))
        for block in self.transformer.core_block:
            block_idx = block_idx + 1
            x = block(x, freqs_cis, block_idx, mask, past_key_values)
            x = x[0] if block.as_tuple else x
        return x, block_idx
