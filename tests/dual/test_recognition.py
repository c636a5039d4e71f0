"""A formula is fused where these very calls are it: branches, state and modes of a module count."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from test_blocks import check_block, perturb
from test_guards import check, state
from torch import nn
from torch.utils.checkpoint import checkpoint

from stars_fast import explain, fused_jsrr, fused_jvp, recognition

FLAG = False


def fused(block, *shape, dtype=torch.float64):
    """The fused ops that stand for a whole module or function."""
    h = state(*shape).to(dtype)
    return {name for (name, kind) in explain(block, h).ops if kind == "fused"}


class Base(nn.Module):
    limit = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.eps = 1e-6

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class ByDim(Base):
    def forward(self, x):
        return self.norm(x) if x.dim() == 3 else 2 * self.norm(x)


class ByLength(Base):
    def forward(self, x):
        return self.norm(x) if x.shape[-2] <= 4 else self.norm(x) + x


class ByBatch(Base):
    def forward(self, x):
        return self.norm(x) if len(x) == 2 else self.norm(x) * 0.5


class ByMode(Base):
    def forward(self, x):
        return self.norm(x) * 3 if self.training else self.norm(x)


class ByGradMode(Base):
    def forward(self, x):
        return self.norm(x) if torch.is_grad_enabled() else x


class ByDtype(Base):
    def forward(self, x):
        return self.norm(x) if x.dtype == torch.float32 else 2 * x


class ByValue(Base):
    def forward(self, x):
        return self.norm(x) if x.abs().max() < 1 else self.norm(x).sin()


class ByGlobal(Base):
    def forward(self, x):
        return self.norm(x) * 2 if FLAG else self.norm(x)


class ByClass(Base):
    def forward(self, x):
        return self.norm(x) if self.limit is None else self.norm(x.clamp(max=self.limit))


class ByCount(Base):
    def __init__(self):
        super().__init__()
        self.state = {"calls": 0}

    def forward(self, x):
        self.state["calls"] += 1
        return self.norm(x) * self.state["calls"]


class Clamped(Base):
    def forward(self, x):
        return self.norm(x.clamp(-3e4, 3e4))


class ClampedAfter(Base):
    def forward(self, x):
        return self.norm(x).clamp(-1.0, 1.0)


class ClampedVariance(Base):
    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True).clamp(min=0.5)
        return self.weight * x * torch.rsqrt(variance + self.eps)


class EpsOutside(Base):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 0.1)


class EpsFloor(Base):
    def forward(self, x):
        return self.weight * x / x.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=0.5)


class EpsTwice(Base):
    def forward(self, x):
        v = x.pow(2).mean(-1, keepdim=True) + 0.1
        return self.weight * x * torch.rsqrt(v + 0.1)


class OtherMean(Base):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps)


class OtherSquare(Base):
    def forward(self, x):
        return self.weight * x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + self.eps)


class TwoTensors(Base):
    """The mean square of one, times another of the same shape."""

    def forward(self, x):
        y = x.sin()
        return self.weight * y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class ConstantScale(Base):
    def forward(self, x):
        with torch.no_grad():
            r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x * r


class KeepsVariance(Base):
    def forward(self, x):
        v = x.pow(2).mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(v + self.eps) + v


class WritesBetween(Base):
    def forward(self, h):
        x = h * 1.0
        square = x.pow(2)
        x.add_(1.0)
        return self.weight * x * torch.rsqrt(square.mean(-1, keepdim=True) + self.eps)


class WritesAfter(Base):
    def forward(self, h):
        x = h * 1.0
        v = x.square().mean(-1, keepdim=True)
        y = self.weight * x * torch.rsqrt(v + self.eps)
        x += y
        return x * v


class WritesThroughAView(Base):
    def forward(self, h):
        x = h * 1.0
        row = x[..., 0]
        v = x.square().mean(-1, keepdim=True)
        row.mul_(2.0)
        return self.weight * x * torch.rsqrt(v + self.eps)


class OverwritesItsWeight(Base):
    """Scales by a buffer that it changes at once."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale
        with torch.no_grad():
            self.scale.mul_(2.0)
        return y


WRITERS = [WritesBetween, WritesAfter, WritesThroughAView]
APART = [ByGradMode, ByCount, ConstantScale, OverwritesItsWeight, *WRITERS]
NORMS = [each for each in Base.__subclasses__() if each not in APART]


@pytest.mark.parametrize("norm", NORMS, ids=lambda c: c.__name__)
def test_a_norm_is_what_it_computes(norm):
    for shape in ((2, 3, 4), (2, 3, 6, 4), (3, 5, 4)):
        check_block(norm(), state(*shape))
        check_block(norm().eval(), 1e5 * state(*shape))


@pytest.mark.parametrize(
    "norm",
    [Clamped, ClampedAfter, ClampedVariance, EpsOutside, EpsFloor, EpsTwice, OtherMean,
     OtherSquare, TwoTensors, WritesBetween, ByMode, ByValue],
    ids=lambda c: c.__name__,
)  # fmt: skip
def test_another_formula_is_not_called_a_norm(norm):
    assert norm.__name__ not in fused(norm(), 2, 3, 4)


@pytest.mark.parametrize("block", [*WRITERS, "WrittenInto"], ids=str)
def test_writes_between_the_ops_of_a_formula(block):
    """Value and tangent: autograd refuses the gradient of such code, in eager too."""
    block = WrittenInto() if block == "WrittenInto" else block()
    h, v = state(2, 3, 4), state(2, 3, 4, seed=4)
    for given in (h, h.clone().requires_grad_()):
        with torch.no_grad():
            expected = torch.func.jvp(block, (h,), (v,))
            found = fused_jvp(block, given, v)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        for mine, theirs in zip(fused_jvp(block, given, v), expected, strict=True):
            torch.testing.assert_close(mine.detach(), theirs)


def test_a_weight_that_is_overwritten_counts_as_it_was():
    norm, h, v = OverwritesItsWeight(), state(2, 3, 4), state(2, 3, 4, seed=4)
    for scale in (1.0, 2.0, 4.0):
        with torch.no_grad():
            value, _ = fused_jvp(norm, h, v)
        expected = scale * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + norm.eps)
        torch.testing.assert_close(value, expected)


def test_a_branch_counts_where_it_is_taken():
    assert fused(ByDim(), 2, 3, 4) == {"ByDim"}
    assert fused(ByDim(), 2, 3, 6, 4) == {"rms_norm"}
    assert fused(ByLength(), 2, 3, 4) == {"ByLength"}
    assert fused(ByLength(), 2, 5, 4) == {"rms_norm"}
    assert fused(ByMode().eval(), 2, 3, 4) == {"ByMode"}
    assert fused(ByDtype().float(), 2, 3, 4, dtype=torch.float32) == {"ByDtype"}
    assert fused(ByDtype(), 2, 3, 4) == set()


def test_flags_of_the_class_and_of_the_python_module_are_noticed(monkeypatch):
    for norm, owner, name, value in (
        (ByClass(), ByClass, "limit", 0.25),
        (ByGlobal(), __import__(__name__), "FLAG", True),
    ):
        assert fused(norm, 2, 3, 4) == {type(norm).__name__}
        monkeypatch.setattr(owner, name, value)
        check_block(norm, state(2, 3, 4))
        assert type(norm).__name__ not in fused(norm, 2, 3, 4)


def test_state_of_its_own_moves_once_a_call():
    norm = ByCount()
    h, v = state(2, 3, 4), state(2, 3, 4, seed=4)
    for calls in (1, 2, 3):
        value, _ = fused_jvp(norm, h, v)
        assert norm.state["calls"] == calls
        torch.testing.assert_close(value, calls * norm.norm(h))


def test_a_forward_patched_on_the_instance_or_the_class_later_is_noticed(monkeypatch):
    norm = ByDim()
    assert fused(norm, 2, 3, 4) == {"ByDim"}
    other = copy.deepcopy(norm)
    other.forward = types.MethodType(lambda self, x: self.norm(x).exp(), other)
    check_block(other, state(2, 3, 4))
    monkeypatch.setattr(ByDim, "forward", lambda self, x: self.norm(x).cos())
    check_block(norm, state(2, 3, 4))
    assert "ByDim" not in fused(norm, 2, 3, 4)


def test_hooks_and_parametrizations_take_part():
    norm = ByDim()
    norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    norm.register_forward_hook(lambda _, __, out: out * 2)
    check_block(norm, state(2, 3, 4))

    class Positive(nn.Module):
        def forward(self, x):
            return F.softplus(x)

    norm = ByDim()
    nn.utils.parametrize.register_parametrization(norm, "weight", Positive())
    check_block(norm, state(2, 3, 4))


def test_a_constant_scale_has_no_gradient_but_a_tangent():
    """Under no_grad the root is a constant for autograd, in the product too."""
    norm, h, v = ConstantScale(), state(2, 3, 4).requires_grad_(), state(2, 3, 4, seed=4)
    _, tangent = fused_jvp(norm, h, v)
    r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + norm.eps).detach()
    r_dot = torch.func.jvp(
        lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps), (h.detach(),), (v,)
    )[1]
    expected = norm.weight * (v * r + h * r_dot)
    torch.testing.assert_close(tangent, expected)
    for mine, theirs in zip(
        torch.autograd.grad(tangent.sum(), [h, norm.weight]),
        torch.autograd.grad(expected.sum(), [h, norm.weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_grad_mode_is_that_of_the_call():
    norm = ByGradMode()
    check_block(norm, state(2, 3, 4))
    with torch.no_grad():
        value, tangent = fused_jvp(norm, state(2, 3, 4), state(2, 3, 4, seed=4))
    assert torch.equal(value, state(2, 3, 4))
    assert torch.equal(tangent, state(2, 3, 4, seed=4))


def test_rows_of_zeros():
    h = state(2, 3, 4)
    h[0] = 0.0
    check_block(ByDim(), h)


def test_a_root_of_zero_is_infinitely_steep_as_in_eager():
    """Below a floor it is a constant, but its gradient there is 0 times infinity, in torch's plain
    backward too."""
    norm, h, v = EpsFloor(), state(2, 3, 4), state(2, 3, 4, seed=4)
    h[0] = 0.0
    h.requires_grad_()
    value, tangent = fused_jvp(norm, h, v)
    expected = torch.func.jvp(norm, (h,), (v,))
    torch.testing.assert_close((value, tangent), expected)
    eager = torch.autograd.grad(norm(h).sum(), h)[0].isnan()
    assert eager.any()
    for y in (value, tangent):
        assert torch.equal(torch.autograd.grad(y.sum(), h, retain_graph=True)[0].isnan(), eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [ByDim, Clamped, EpsOutside, ByDtype], ids=lambda c: c.__name__)
def test_narrow_numbers_follow_their_own_branch(norm, dtype):
    block = norm().to(dtype)
    h, v = (1e5 * state(2, 3, 4)).to(dtype), state(2, 3, 4, seed=4).to(dtype)
    value, tangent = fused_jvp(block, h, v)
    assert value.dtype == block(h).dtype
    torch.testing.assert_close(value, block(h))
    # The formula of this dtype's branch, in fp64.
    exact = (lambda x: 2 * x) if norm is ByDtype and dtype is torch.bfloat16 else None
    exact = exact or (norm.norm.__get__(copy.deepcopy(block).double()) if norm is ByDtype else None)
    exact = exact or copy.deepcopy(block).double()
    expected = torch.func.jvp(exact, (h.double(),), (v.double(),))[1]
    error = (tangent.double() - expected).norm() / (v.double().norm() + expected.norm())
    assert error < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast_keeps_dtypes(dtype):
    norm = ByDim().to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for h in (state(2, 3, 4).to(dtype), state(2, 3, 4).bfloat16()):
            value, _ = fused_jvp(norm, h, h)
            assert value.dtype == norm(h).dtype
            # A few roundings of bf16, of 4e-3 each.
            torch.testing.assert_close(value, norm(h), rtol=2e-2, atol=2e-2)


# -- gates and activations


class Gate(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.w1, self.w3 = (nn.Linear(4, 6, bias=bias, dtype=torch.float64) for _ in range(2))
        self.w2 = nn.Linear(6, 4, bias=bias, dtype=torch.float64)

    def forward(self, x):
        return self.w2(self.gate(self.w1(x), self.w3(x)))


class Plain(Gate):
    def gate(self, g, u):
        return F.silu(g) * u


class Swapped(Gate):
    def gate(self, g, u):
        return g * F.silu(u)


class Limited(Gate):
    """The experts of GPT-OSS."""

    def gate(self, g, u):
        g, u = g.clamp(max=0.7), u.clamp(-0.7, 0.7)
        return (u + 1) * (g * torch.sigmoid(1.702 * g))


class WrittenSilu(Gate):
    def gate(self, g, u):
        return g * torch.sigmoid(g) * u


class QuickGelu(Gate):
    def gate(self, g, u):
        return g * torch.sigmoid(1.702 * g) * u


class Clipped(Gate):
    def gate(self, g, u):
        return F.relu(g).clamp(max=0.5) * u


class Both(Gate):
    def gate(self, g, u):
        return F.silu(g) * F.gelu(u)


class SameTwice(Gate):
    def gate(self, g, u):
        a = F.silu(g)
        return a * a + a * u


class WrittenInto(Gate):
    def gate(self, g, u):
        a = F.silu(g)
        g.mul_(2.0)
        return a * u + g


class InPlace(Gate):
    def gate(self, g, u):
        a = F.gelu(u)
        return F.silu(g, inplace=True) * a + g


class Broadcast(Gate):
    def gate(self, g, u):
        return F.silu(g) * u[..., :1]


class Softplus(Gate):
    def gate(self, g, u):
        return F.softplus(g, threshold=0.5) * u


class WrittenGelu(Gate):
    def gate(self, g, u):
        inner = 0.7978845608028654 * (g + 0.044715 * torch.pow(g, 3.0))
        return 0.5 * g * (1.0 + torch.tanh(inner)) * u


class AlmostGelu(Gate):
    def gate(self, g, u):
        inner = 0.8 * (g + 0.044715 * torch.pow(g, 3.0))
        return 0.5 * g * (1.0 + torch.tanh(inner)) * u


class MixedGelu(Gate):
    """Half of one times the cumulative part of the other."""

    def gate(self, g, u):
        inner = 0.7978845608028654 * (g + 0.044715 * torch.pow(g, 3.0))
        return 0.5 * u * (1.0 + torch.tanh(inner))


class Later(Gate):
    """A checkpointed part begins at an activation that has not run."""

    part = staticmethod(lambda a, u: a.sin() * u)

    def gate(self, g, u):
        return checkpoint(self.part, F.silu(g), u, use_reentrant=False)


GATES = Gate.__subclasses__()


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "gate", [g for g in GATES if g not in (Later, WrittenInto)], ids=lambda c: c.__name__
)
def test_a_gate_is_what_it_computes(gate, bias):
    check_block(gate(bias), state(2, 3, 4))


def test_gates_by_name():
    assert fused(Plain(), 2, 3, 4) == {"Plain:silu*up"}
    assert fused(Swapped(), 2, 3, 4) == {"Swapped:silu*up"}
    assert fused(WrittenSilu(), 2, 3, 4) == {"WrittenSilu:silu*up"}
    assert fused(WrittenGelu(), 2, 3, 4) == {"WrittenGelu:gelu_tanh*up"}
    for other in (Limited, QuickGelu, Clipped, AlmostGelu, MixedGelu, Broadcast, Softplus):
        assert not any("up" in name for name in fused(other(), 2, 3, 4)), other


def test_dropout_between_stays():
    class Dropped(Gate):
        def gate(self, g, u):
            return F.dropout(F.silu(g), 0.5, self.training) * u

    gate = Dropped()
    torch.manual_seed(0)
    one, _ = fused_jvp(gate, state(2, 3, 4), state(2, 3, 4, seed=4))
    torch.manual_seed(0)
    torch.testing.assert_close(one, gate(state(2, 3, 4)))
    assert "Dropped:silu*up" in fused(gate.eval(), 2, 3, 4)
    check_block(gate, state(2, 3, 4))


def test_wrapped_projections_are_called():
    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.a = nn.Linear(base.in_features, 2, bias=False, dtype=torch.float64)
            self.b = nn.Linear(2, base.out_features, bias=False, dtype=torch.float64)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    gate = Plain()
    for name in ("w1", "w3", "w2"):
        setattr(gate, name, Lora(getattr(gate, name)))
    assert fused(gate, 2, 3, 4) == {"Plain:silu*up"}
    check_block(gate, state(2, 3, 4))


@pytest.mark.parametrize(
    "part",
    [lambda a, u: a.sin() * u, lambda a, u: a * u, lambda a, u: a.exp() + (a * u), lambda a, u: a],
    ids=["sin", "product", "both", "nothing"],
)
def test_a_checkpointed_part_that_begins_at_a_waiting_op(part):
    gate, h, v = Later(), state(2, 3, 4), state(2, 3, 4, seed=4)
    gate.part = part
    kept = torch.autograd.grad(
        fused_jsrr(gate, h, v=v), list(gate.parameters()), materialize_grads=True
    )
    gate.gate = lambda g, u: part(F.silu(g), u)
    plain = torch.autograd.grad(
        fused_jsrr(gate, h, v=v), list(gate.parameters()), materialize_grads=True
    )
    for a, b in zip(kept, plain, strict=True):
        assert relative_error(a, b) <= 1e-12


@pytest.mark.parametrize("name", ["gpt_neox", "olmo2", "mistral", "phi3"])
def test_layers_of_other_families(name):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = {
        "gpt_neox": transformers.GPTNeoXConfig,
        "olmo2": transformers.Olmo2Config,
        "mistral": transformers.MistralConfig,
        "phi3": transformers.Phi3Config,
    }[name](**sizes)
    config._attn_implementation = "sdpa"
    model = transformers.AutoModel.from_config(config).eval()

    def block(h):
        return model(inputs_embeds=h, use_cache=False).last_hidden_state

    h, v = state(2, 6, 16).float(), state(2, 6, 16, seed=4).float()
    found = {op for op, kind in explain(block, h).ops if kind == "fused"}
    assert (
        found
        >= {
            "gpt_neox": {"layer_norm"},
            "olmo2": {"Olmo2RMSNorm", "Olmo2MLP:silu*up", "apply_rotary_pos_emb"},
            "mistral": {"MistralRMSNorm", "MistralMLP:silu*up", "apply_rotary_pos_emb"},
            "phi3": {"Phi3RMSNorm"},
        }[name]
    )
    value, tangent = fused_jvp(block, h, v)
    with recognition(False):
        same, expected = fused_jvp(block, h, v)
    # fp32 sums of a layer in another order.
    torch.testing.assert_close(value, same, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value, block(h), rtol=1e-4, atol=1e-5)


# -- rotary


def half(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (half(q) * sin), (k * cos) + (half(k) * sin)


def by_length(q, k, cos, sin):
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return (q, k) if q.shape[-2] < 4 else (q + 1, k)


def partial(q, k, cos, sin):
    half_width = q.shape[-1] // 2
    cos, sin = cos[..., :half_width], sin[..., :half_width]
    turned = apply_rotary_pos_emb(q[..., :half_width], k[..., :half_width], cos, sin)
    return tuple(
        torch.cat((a, b[..., half_width:]), -1) for a, b in zip(turned, (q, k), strict=True)
    )


def interleaved(q, k, cos, sin):
    def turn(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def backwards(q, k, cos, sin):
    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat((b, -a), -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def same_half(q, k, cos, sin):
    def turn(x):
        a, _ = x.chunk(2, -1)
        return torch.cat((-a, a), -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def other_tensor(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half(k) * sin, k * cos + half(q) * sin


def seconds_first(q, k, cos, sin):
    return apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)[
        0
    ].transpose(1, 2), k


def writes_the_query(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = q * 1.0
    kept, turned = q * cos, half(q)
    q.mul_(2.0)
    return kept + turned * sin + q, k


ROTARY = [apply_rotary_pos_emb, by_length, partial, interleaved, backwards, same_half, other_tensor,
          seconds_first, writes_the_query]  # fmt: skip


class Turned(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        angles = torch.arange(x.shape[1] * 8).view(1, x.shape[1], 8).to(x.dtype)
        q, k = self.function(heads, heads.sin(), angles.cos(), angles.sin())
        return (q + 2 * k).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("function", ROTARY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("length", [3, 5])
def test_a_rotation_is_what_it_computes(function, length):
    check(Turned(function), 2, length, 16)


def test_rotations_by_name():
    assert "apply_rotary_pos_emb" in fused(Turned(apply_rotary_pos_emb), 2, 3, 16)
    for other in (interleaved, backwards, same_half, other_tensor, seconds_first, writes_the_query):
        names = fused(Turned(other), 2, 3, 16)
        assert not names & {"rotary", "apply_rotary_pos_emb"}, other


def test_tables_of_another_dtype():
    def narrow(q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos.float(), sin.float())

    def wide(q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos.double(), sin.double())

    check(Turned(narrow), 2, 3, 16)
    h = state(2, 3, 16).float()
    for function in (narrow, wide):
        value, _ = fused_jvp(Turned(function), h, h)
        expected = Turned(function)(h)
        assert value.dtype == expected.dtype
        torch.testing.assert_close(value, expected)


# -- what is changed: nothing


def test_classes_modules_and_functions_stay_what_they_are():
    pytest.importorskip("transformers")
    from test_blocks import hf_layer
    from transformers.models.llama import modeling_llama as llama

    before = {
        "norm": llama.LlamaRMSNorm.forward,
        "mlp": llama.LlamaMLP.forward,
        "rotary": llama.apply_rotary_pos_emb,
    }
    layer, kwargs = hf_layer("llama", "sdpa")
    kwargs["attention_mask"] = None
    fused_jsrr(layer, state(2, 6, 16), kwargs=kwargs).backward()
    explain(layer, state(2, 6, 16), kwargs=kwargs)
    assert before["norm"] is llama.LlamaRMSNorm.forward
    assert before["mlp"] is llama.LlamaMLP.forward
    assert before["rotary"] is llama.apply_rotary_pos_emb
    assert not any(m._forward_hooks for m in layer.modules())
    assert not torch.nn.modules.module._global_forward_hooks


def test_it_can_be_switched_off():
    block = perturb(Plain())
    with recognition(False):
        assert fused(block, 2, 3, 4) == {"silu"}
        check_block(block, state(2, 3, 4))
    assert fused(block, 2, 3, 4) == {"Plain:silu*up"}


def test_a_write_through_a_plain_alias_lets_waiting_ops_run_first():
    def block(x):
        y = x * 1.0
        a = F.silu(y)
        y.detach().mul_(2.0)
        return a + y

    x = state(2, 3, 4)
    out, _ = fused_jvp(block, x, state(2, 3, 4, seed=4))
    torch.testing.assert_close(out, block(x))


def test_a_write_that_nobody_sees_is_an_error():
    def block(x):
        y = x * 1.0
        a = F.silu(y)
        alias = y.detach()
        with torch._C.DisableTorchFunction():
            alias.mul_(2.0)
        return a + y

    with pytest.raises(RuntimeError, match="written in place"):
        fused_jvp(block, state(2, 3, 4), state(2, 3, 4, seed=4))
