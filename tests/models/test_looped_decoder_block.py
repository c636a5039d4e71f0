"""The turn of looped decoders as a block of `fused_jsrr`: loss and gradients in fp64."""

import pytest
import torch

pytest.importorskip("transformers")

from decoder_models import DECODERS, WIDTH, left_padded, tokens
from oracle import KeepDouble, WrittenOutNorm, relative_error
from test_looped_decoder import looped
from tolerances import BLOCK
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stars_fast import explain, fused_jsrr
from stars_fast.models.looped_block import looped_block
from stars_fast.ops import reference

B, S = 2, 7
LOOPS = {
    "none": {},
    "add": {"injection": "add"},
    "adapter": {"injection": "adapter"},
    "adapter, noise, norm": {"injection": "adapter", "state": "noise", "norm_between": True},
}
CASES = [(name, "none", padded) for name in DECODERS for padded in (False, True)] + [
    (name, loop, True) for name in ("gemma3", "gpt2") for loop in LOOPS if loop != "none"
]


class WrittenOutRMSNorm(TorchFunctionMode):
    """The norm between turns as products and sums, for torch's own derivatives."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.rms_norm:
            return reference.rms_norm(args[0], kwargs["weight"], kwargs["eps"])
        return func(*args, **kwargs)


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, S, WIDTH, generator=generator, dtype=torch.float64)


def case(name, loop, padded=False):
    """A block, its options, and which tokens are real."""
    model = looped(name, **LOOPS[loop])
    _, mask = left_padded(tokens(B, S), S, 5)
    options = {"attention_mask": mask} if padded else {}
    if loop != "none":
        options["inputs"] = state(8)
    return model, looped_block(model, **options), (mask if padded else torch.ones(B, S))


@pytest.mark.parametrize(("name", "loop", "padded"), CASES)
def test_loss_and_gradients_against_torch(name, loop, padded):
    with KeepDouble():
        _, block, real = case(name, loop, padded)
        h, v = state(3), state(5)
        leaves = list(block.parameters())
        loss = fused_jsrr(block, h, v=v, mask=real.bool())
        got = torch.autograd.grad(loss, leaves, allow_unused=True)
        u = v * real[..., None]
        u = u / u.square().sum((1, 2), keepdim=True).sqrt()
        with sdpa_kernel(SDPBackend.MATH), WrittenOutNorm(), WrittenOutRMSNorm():
            jv = torch.func.jvp(block, (h,), (u,))[1] * real[..., None]
            expected = jv.square().sum((1, 2)).mean()
            gradients = torch.autograd.grad(expected, leaves, allow_unused=True)
    assert relative_error(loss, expected) <= BLOCK
    for p, mine, theirs in zip(leaves, got, gradients, strict=True):
        if mine is None or theirs is None:
            for grad in (mine, theirs):
                assert grad is None or grad.abs().max() <= 1e-12, p.shape
        else:
            assert relative_error(mine, theirs) <= BLOCK, p.shape


@torch.no_grad()
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_the_turn_of_the_model(loop, padded):
    model = looped("gemma3", **LOOPS[loop])
    ids, mask = left_padded(tokens(B, S), S, 5)
    given = {"attention_mask": mask} if padded else {}
    out = model(ids, turns=2, output_hidden_states=True, **given)
    inputs = None if loop == "none" else out.inputs
    real = mask.bool() if padded else torch.ones_like(ids, dtype=torch.bool)
    for part in (model, model.model):
        block = looped_block(part, inputs=inputs, **given)
        for before, after in zip(out.hidden_states[:-1], out.hidden_states[1:], strict=True):
            torch.testing.assert_close(block(before)[real], after[real], rtol=1e-9, atol=1e-9)
    names = {name.split(".")[0] for name, _ in block.named_parameters()}
    assert names == {"layers"} | ({"adapter"} if "adapter" in loop else set()) | (
        {"norm"} if "norm" in loop else set()
    )


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gpt2"])
def test_no_op_falls_back(name):
    with KeepDouble():
        _, block, _ = case(name, "adapter, noise, norm")
        found = explain(block, state(3))
    assert found.fallbacks == []
    fused = {op for op, kind in found.ops if kind == "fused"}
    for part in ("norm", "attention", "rotary", "mlp:"):
        assert any(part in op.lower() for op in fused), part


def test_what_does_not_fit_is_named():
    model, block, _ = case("llama", "adapter")
    with pytest.raises(ValueError, match=r"inputs: expected the prelude's output.* got None"):
        looped_block(model)(state(3))
    with pytest.raises(ValueError, match=r"inputs: .*h's shape \[2, 6, 32\], got \[2, 7, 32\]"):
        block(state(3)[:, 1:])
    with pytest.raises(ValueError, match="layers: expected None for a looped decoder"):
        looped_block(model, layers=slice(1))
    with pytest.raises(ValueError, match="inputs: expected None for a looped decoder without inj"):
        looped_block(looped("llama"), inputs=state(8))
    with pytest.raises(ValueError, match="inputs: expected the prelude's output"):
        model.model.turn(state(3), model.model.prepare(state(3)))
