"""Mixture-of-experts layers of transformers with its default, grouped products, against
torch.func.jvp of the same layer with one expert at a time."""

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    KeepDouble,
    WrittenOutNorm,
    randn,
    relative_error,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from stars_fast import Dual, explain
from stars_fast.dual.dual_pass import dual_pass, first_output

OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second group is empty
# Shapes of the operands: rows, columns or the inner dimension in groups, and a batch.
FORMS = {
    "rows": ((5, 4), (3, 4, 6)),
    "columns": ((3, 6, 4), (4, 5)),
    "inner": ((6, 5), (5, 4)),
    "batch": ((3, 5, 4), (3, 4, 6)),
}


def by_hand(form, a, b):
    i, j, k = 0, 2, 5
    if form == "batch":
        return a @ b
    if form == "rows":
        return torch.cat((a[i:j] @ b[0], a[j:k] @ b[2]))
    if form == "columns":
        return torch.cat((a[0] @ b[:, i:j], a[2] @ b[:, j:k]), 1)
    empty = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    return torch.stack((a[:, i:j] @ b[i:j], empty, a[:, j:k] @ b[j:k]))


@pytest.mark.parametrize("moving", ["first", "second", "both"])
@pytest.mark.parametrize("form", FORMS)
def test_grouped_products(form, moving):
    a, b = (randn(2, *shape).requires_grad_() for shape in FORMS[form])
    offs = None if form == "batch" else OFFSETS
    duals = [
        Dual(x) if moving in (name, "both") else x[0] for name, x in (("first", a), ("second", b))
    ]
    tangents = [
        x[1] if type(d) is Dual else torch.zeros_like(x[1])
        for x, d in zip((a, b), duals, strict=True)
    ]
    out = F.grouped_mm(*duals, offs=offs).stack
    expected = torch.func.jvp(lambda x, y: by_hand(form, x, y), (a[0], b[0]), tuple(tangents))
    bar = randn(*out.shape, seed=9)
    assert relative_error(out, torch.stack(expected)) <= 1e-12
    got = torch.autograd.grad(out, (a, b), bar)
    theirs = torch.autograd.grad(expected, (a, b), (bar[0], bar[1]))
    for mine, other in zip(got, theirs, strict=True):
        assert relative_error(mine, other) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_kernel_is_used_where_it_has_the_dtype(dtype):
    a, b = randn(2, 5, 16, dtype=dtype), randn(3, 16, 8, seed=1, dtype=dtype)
    out = F.grouped_mm(Dual(a), b, offs=OFFSETS)
    assert out.dtype == dtype
    assert torch.equal(out.primal, F.grouped_mm(a[0], b, offs=OFFSETS))
    exact = by_hand("rows", a[1].double(), b.double())
    assert relative_error(out.tangent, exact) <= 4 * torch.finfo(dtype).eps


def moe_layer(name, experts):
    transformers = pytest.importorskip("transformers")
    common = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 2,
        "experts_implementation": experts,
    }
    some = {"num_experts": 4, "moe_intermediate_size": 8}
    settings = {
        "Mixtral": {"num_local_experts": 4},
        "Qwen2Moe": {**some, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1},
        "Qwen3Moe": {**some, "decoder_sparse_step": 1},
        "Olmoe": {"num_experts": 4},
        "GptOss": {"num_local_experts": 4, "attn_implementation": "eager"},
        "DeepseekV3": {
            "n_routed_experts": 4,
            "moe_intermediate_size": 8,
            "first_k_dense_replace": 0,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "num_key_value_heads": 4,
        },
    }[name]
    config = getattr(transformers, f"{name}Config")(**{**common, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    tables = model.rotary_emb(torch.zeros(1, 5, 16, dtype=torch.float64), torch.arange(5)[None])
    kwargs = {"position_embeddings": tables, "attention_mask": None}
    return model.layers[1], kwargs


MODELS = ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "DeepseekV3", "GptOss"]


@pytest.mark.parametrize("name", MODELS)
def test_decoder_layers(name):
    layer, kwargs = moe_layer(name, None)  # the default
    one_by_one, _ = moe_layer(name, "eager")
    one_by_one.load_state_dict(layer.state_dict())
    h, v = randn(2, 5, 16).requires_grad_(), randn(2, 5, 16, seed=1)
    names = [n for n, _ in layer.named_parameters()]
    assert any("experts" in n for n in names)
    y_bar, y_dot_bar = randn(2, 5, 16, seed=2), randn(2, 5, 16, seed=3)
    with KeepDouble():
        with sdpa_kernel(SDPBackend.MATH), WrittenOutNorm():
            reference = lambda x: first_output(one_by_one(x, **kwargs))  # noqa: E731
            y, y_dot = torch.func.jvp(reference, (h,), (v,))
            theirs = torch.autograd.grad(
                (y * y_bar).sum() + (y_dot * y_dot_bar).sum(),
                [h, *one_by_one.parameters()],
                allow_unused=True,
            )
        out = dual_pass(layer, torch.stack((h, v)), (), kwargs)
        loss = (out * torch.stack((y_bar, y_dot_bar))).sum()
        mine = torch.autograd.grad(loss, [h, *layer.parameters()], allow_unused=True)
        found = explain(layer, h.detach(), kwargs=kwargs)
    assert any("grouped_mm" in op for op, _ in found.ops)
    assert relative_error(out[0], y) <= 1e-9
    assert relative_error(out[1], y_dot) <= 1e-9
    for n, a, b in zip(["h", *names], mine, theirs, strict=True):
        assert (a is None) == (b is None), n
        if a is not None:
            assert relative_error(a, b) <= 1e-9, n
            assert a.any(), n
