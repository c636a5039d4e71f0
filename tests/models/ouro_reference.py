"""Ouro read once more from its description, in fp64, one sequence, one head and one turn at a time.

Nothing here is shared with the package or with transformers: pads are cut out rather than masked,
rotary pairs are complex numbers, and the norms are written out.

S tokens of a row with its pads, n real tokens, D model width, E head width, V vocabulary.
"""

import math

import torch


def logits(weights, config, input_ids, attention_mask, turns, return_states=False):
    """Logits [B, S, V] fp64 after `turns` turns, NaN at pads.

    Args:
        weights: key of the checkpoint -> tensor, of any floating dtype.
        config: fields of config.json.
        input_ids: [B, S] int64.
        attention_mask: [B, S], 1 on real tokens; None where all are.
        return_states: also give the states, a list of `turns` + 1 tensors [B, S, D]; the first are
            the embeddings.
    """
    w = {key: value.double() for key, value in weights.items()}
    head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    states = torch.full((turns + 1, *input_ids.shape, config["hidden_size"]), math.nan).double()
    for row, ids in enumerate(input_ids):
        places = attention_mask[row].nonzero().flatten()
        h = w["model.embed_tokens.weight"][ids[places]]
        states[0, row, places] = h
        for turn in range(turns):
            for i in range(config["num_hidden_layers"]):
                h = _layer(_under(w, f"model.layers.{i}."), config, i, h, places)
            h = _norm(h, w["model.norm.weight"], config)
            states[turn + 1, row, places] = h
    out = states[-1] @ head.T
    return (out, list(states)) if return_states else out


def _layer(w, config, i, h, places):
    """h [n, D] -> [n, D]."""
    branch = _attention(
        _under(w, "self_attn."), config, i, _norm(h, w["input_layernorm.weight"], config), places
    )
    h = h + _norm(branch, w["input_layernorm_2.weight"], config)
    branch = _mlp(_under(w, "mlp."), _norm(h, w["post_attention_layernorm.weight"], config))
    return h + _norm(branch, w["post_attention_layernorm_2.weight"], config)


def _attention(w, config, i, x, places):
    """Head by head, x [n, D] -> [n, D]; query a sees keys b <= a, in a window by their places."""
    heads, kv_heads, width = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    position = torch.arange(len(x))
    seen = position[:, None] >= position[None, :]
    if config["layer_types"][i] == "sliding_attention":
        seen &= places[:, None] - places[None, :] < config["sliding_window"]
    outs = []
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        group = head // (heads // kv_heads)
        shared = slice(group * width, (group + 1) * width)
        q = _rotated(x @ w["q_proj.weight"][own].T, position, config)
        k = _rotated(x @ w["k_proj.weight"][shared].T, position, config)
        v = x @ w["v_proj.weight"][shared].T
        weight = torch.where(seen, (q @ k.T / math.sqrt(width)).exp(), 0.0)
        outs.append(weight / weight.sum(1, keepdim=True) @ v)
    return torch.cat(outs, 1) @ w["o_proj.weight"].T


def _rotated(x, position, config):
    """x [n, E]: entries j and j + E/2, as one complex number, turn by position theta^(-2j/E)."""
    half = x.shape[1] // 2
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    frequency = torch.tensor([theta ** (-j / half) for j in range(half)], dtype=torch.float64)
    angle = position[:, None] * frequency
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), 1)


def _mlp(w, x):
    gate = x @ w["gate_proj.weight"].T
    return gate / (1 + (-gate).exp()) * (x @ w["up_proj.weight"].T) @ w["down_proj.weight"].T


def _norm(x, weight, config):
    return x / (x.square().mean(1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weight


def _under(weights, prefix):
    return {key[len(prefix) :]: w for key, w in weights.items() if key.startswith(prefix)}
