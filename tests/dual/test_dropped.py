"""A number made from a tensor with a tangent is said, at the line that made it."""

import inspect
import math
import warnings

import numpy as np
import pytest
import torch
from test_guards import state
from torch import nn

from stars_fast import explain, fused_jvp
from stars_fast.dual.dropped import TangentDropped

DROPS = {
    "item": lambda x: x * x.mean().item(),
    "float": lambda x: x * float(x.mean()),
    "complex": lambda x: x * complex(x.mean()).real,
    "tolist": lambda x: x * x.mean((1, 2)).tolist()[0],
    "data": lambda x: x * x.data,
    "math": lambda x: x * math.sqrt(x.square().mean()),
    "numpy": lambda x: x * np.float64(x.mean()),
    "list of scalars": lambda x: x * torch.tensor([x.mean()])[0],
    "max of a row": lambda x: x * max(x[0, 0]).item(),
    "full_like": lambda x: x * torch.full_like(x, x.mean()),
    "new_full": lambda x: x * x.new_full((4,), x.mean()),
    "tensor": lambda x: x * torch.tensor(x.mean()),
    "new_tensor": lambda x: x * x.new_tensor(x.mean()),
}

SILENT = {
    "bool": lambda x: x * 2 if x.mean() > 0 else x * 3,
    "comparison": lambda x: torch.where(x > 0, x, 2 * x),
    "int": lambda x: x * int(x.mean() * 100),
    "detach": lambda x: x * x.detach(),
    "detached number": lambda x: x * x.mean().detach().item(),
    "no tangent": lambda x: x * (x * 0).sum().item(),
    "likeness by name": lambda x: x * torch.full_like(input=x, fill_value=2.0),
    "shape": lambda x: x * x.shape[-1] * x.size(0) * len(x),
    "format": lambda x: (f"{x.mean():.3f} {x}", str(x), repr(x), x * 2)[-1],
    "argmax": lambda x: x * x.argmax().item(),
}


def run(f):
    h, v = state(2, 3, 4), state(2, 3, 4, seed=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value, tangent = fused_jvp(f, h, v)
    torch.testing.assert_close(value, f(h))
    found = [each for each in caught if issubclass(each.category, TangentDropped)]
    return tangent, found


@pytest.mark.parametrize("name", DROPS)
def test_a_dropped_tangent_is_said_at_the_line_that_dropped_it(name):
    f = DROPS[name]
    _, found = run(f)
    assert found
    line = inspect.getsourcelines(f)[1]
    assert {(each.filename, each.lineno) for each in found} == {(__file__, line)}


@pytest.mark.parametrize("name", SILENT)
def test_what_loses_nothing_is_silent(name):
    f = SILENT[name]
    tangent, found = run(f)
    assert found == []
    if name not in ("detach", "detached number"):
        expected = torch.func.jvp(f_of_values(name), (state(2, 3, 4),), (state(2, 3, 4, seed=4),))
        torch.testing.assert_close(tangent, expected[1])


def f_of_values(name):
    """The same function with its numbers taken from plain values, for torch.func.jvp."""
    h = state(2, 3, 4)
    factors = {
        "bool": 2 if h.mean() > 0 else 3,
        "int": int(h.mean() * 100),
        "no tangent": 0.0,
        "likeness by name": 2.0,
        "shape": 4 * 2 * 2,
        "format": 2,
        "argmax": h.argmax().item(),
    }
    if name == "comparison":
        return SILENT[name]
    return lambda x: x * factors[name]


def test_a_place_is_said_once():
    def block(x):
        for _ in range(3):
            x = x * x.mean().item()
        return x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", TangentDropped)
        for _ in range(2):
            fused_jvp(block, state(2, 3, 4), state(2, 3, 4, seed=4))
    assert len([each for each in caught if each.category is TangentDropped]) == 1


def test_explain_says_where():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * x.mean().item()

    line = inspect.getsourcelines(Scaled.forward)[1] + 1
    with pytest.warns(TangentDropped):
        found = explain(Scaled(), state(2, 3, 4))
    assert found.dropped == [f"item at {__file__}:{line}"]
    assert f"tangent dropped: item at {__file__}:{line}" in str(found)
    assert explain(nn.Linear(4, 4).double(), state(2, 3, 4)).dropped == []


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_of_transformers_drop_nothing(name, attention):
    pytest.importorskip("transformers")
    from test_blocks import hf_layer

    layer, kwargs = hf_layer(name, attention)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TangentDropped)
        found = explain(layer, state(2, 6, 16), kwargs={"attention_mask": None, **kwargs})
    assert found.dropped == []


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_drop_nothing(family):
    """Routing asks for indices, which carry no tangent."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(0)
    if family == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=4)
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block
    else:
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=24)
        from transformers.models.qwen3_moe.modeling_qwen3_moe import (
            Qwen3MoeSparseMoeBlock as Block,
        )
    config._experts_implementation = "eager"
    block = Block(config).double()
    for p in block.parameters():
        nn.init.normal_(p, std=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TangentDropped)
        found = explain(block, state(2, 6, 16))
    assert found.dropped == []
