"""Huginn and retrofitted decoders read once more from their formulas, in fp64, one sequence, one
head and one turn at a time.

Nothing here is shared with the package or with transformers: rotary pairs are complex numbers, the
state is given, and the norms are written out.

n tokens of a sequence, D model width, E head width, V vocabulary.
"""

import math

import torch


def logits(weights, config, shape, input_ids, states, turns):
    """Logits [B, n, V] fp64 after `turns` turns from `states` [B, n, D].

    `weights` and `config` are those of the files; `shape` is huginn, llama, tinyllama or olmo2.
    """
    w = {key: value.double() for key, value in weights.items()}
    rows = zip(input_ids, states, strict=True)
    return torch.stack([_row(w, config, shape, ids, s.double(), turns) for ids, s in rows])


def _row(w, config, shape, ids, s, turns):
    e = w["transformer.wte.weight"][ids] * config["init_values"]["embed_scale"]
    for i in range(config["n_layers_in_prelude"]):
        e = layer(_under(w, f"transformer.prelude.{i}."), config, shape, e)
    for _ in range(turns):
        s = turn(w, config, shape, s, e)
    if shape == "huginn":
        s = norm(s, w["transformer.ln_f.weight"], config)
    for i in range(config["n_layers_in_coda"]):
        s = layer(_under(w, f"transformer.coda.{i}."), config, shape, s)
    head = "transformer.wte.weight" if config["tie_embeddings"] else "lm_head.weight"
    return norm(s, w["transformer.ln_f.weight"], config) @ w[head].T


def turn(w, config, shape, s, e):
    """The core on the adapter's output, s and e [n, D] -> [n, D]."""
    width = config["n_embd"]
    adapter = w["transformer.adapter.weight"]
    s = s @ adapter[:, :width].T + e @ adapter[:, width:].T
    for i in range(config["n_layers_in_recurrent_block"]):
        s = layer(_under(w, f"transformer.core_block.{i}."), config, shape, s)
    return s


def layer(w, config, shape, x):
    """x [n, D] -> [n, D]."""
    norms = [w.get(f"norm_{i}.weight") for i in (1, 2, 3, 4)]
    if shape == "huginn":
        x = norm(x + attention(w, config, shape, norm(x, norms[0], config)), norms[1], config)
        return norm(x + mlp(w, config, norm(x, norms[2], config)), norms[3], config)
    if shape == "olmo2":
        x = x + norm(attention(w, config, shape, x), norms[0], config)
        return x + norm(mlp(w, config, x), norms[1], config)
    x = x + attention(w, config, shape, norm(x, norms[0], config))
    return x + mlp(w, config, norm(x, norms[1], config))


def attention(w, config, shape, x):
    """Head by head, x [n, D] -> [n, D]; token a sees tokens b <= a."""
    heads, kv_heads, width = config["n_heads"], config["num_key_value_heads"], config["head_dim"]
    qkv = x @ w["attn.Wqkv.weight"].T
    q = qkv[:, : heads * width]
    k = qkv[:, heads * width : (heads + kv_heads) * width]
    v = qkv[:, (heads + kv_heads) * width :]
    if shape == "olmo2":
        q = norm(q, w["attn.q_norm.weight"], config)
        k = norm(k, w["attn.k_norm.weight"], config)
    outs = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        a, b, c = (
            m[:, i * width : (i + 1) * width] for m, i in ((q, head), (k, group), (v, group))
        )
        if config["qk_bias"]:
            a, b = a + w["attn.qk_bias"][0, 0, head], b + w["attn.qk_bias"][1, 0, group]
        a, b = (rotated(m, config, shape) for m in (a, b))
        scores = (a @ b.T) / math.sqrt(width)
        place = torch.arange(len(x))
        scores[place[:, None] < place] = -math.inf
        outs.append(torch.softmax(scores, -1) @ c)
    return torch.cat(outs, -1) @ w["attn.proj.weight"].T


def rotated(x, config, shape):
    """Pairs of x [n, E] as complex numbers, times exp(i position theta_j): neighbours in Huginn, of
    a half each in the others."""
    n, width = x.shape
    turns = torch.polar(torch.ones(n, width // 2).double(), angles(n, config, shape))
    if shape == "huginn":
        z = torch.complex(x[:, ::2], x[:, 1::2]) * turns
        return torch.stack((z.real, z.imag), -1).flatten(1)
    z = torch.complex(*x.chunk(2, -1)) * turns
    return torch.cat((z.real, z.imag), -1)


def angles(n, config, shape):
    """[n, E / 2], position times theta_j; long wavelengths of a scaled Llama are stretched (as the
    Llama 3.1 report's code does: by the factor beyond the low one, not at all below the high one,
    between them by a linear blend of the two)."""
    half = config["head_dim"] // 2
    base = config["rope_base"] if shape == "huginn" else config["rope_theta"]
    found = []
    for j in range(half):
        theta = base ** (-j / half)
        scaling = config.get("rope_scaling")
        if scaling:
            cycles = scaling["original_max_position_embeddings"] * theta / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            blend = min(max((cycles - low) / (high - low), 0.0), 1.0)
            theta = (1 - blend) * theta / scaling["factor"] + blend * theta
        found.append(theta)
    return torch.arange(n).double()[:, None] * torch.tensor(found, dtype=torch.float64)


def mlp(w, config, x):
    """proj(silu(g) u), x [n, D] -> [n, D]."""
    inner = config["intermediate_size"]
    g, u = x @ w["mlp.fc.weight"][:inner].T, x @ w["mlp.fc.weight"][inner:].T
    return (g / (1 + torch.exp(-g)) * u) @ w["mlp.proj.weight"].T


def norm(x, weight, config):
    return x / (x.square().mean(-1, keepdim=True) + config["norm_eps"]).sqrt() * weight


def _under(w, prefix):
    return {key.removeprefix(prefix): x for key, x in w.items() if key.startswith(prefix)}
