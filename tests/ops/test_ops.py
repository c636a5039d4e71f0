"""Every op against its reference in fp64: value, tangent, and the cotangents of both."""

import pytest
import torch
import torch.nn.functional as F
from dual_reference import FP64, relative_error
from torch.nn.attention import SDPBackend, sdpa_kernel

from stars_fast import Dual, ops
from stars_fast.ops import reference
from stars_fast.ops.pointwise import DERIVATIVES


def randn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def check(op, ref, stacks, plains=(), tolerance=FP64):
    """`op(*stacks, *plains)` against torch.func.jvp of `ref` and autograd of that."""
    stacks = [s.detach().requires_grad_() for s in stacks]
    plains = [p.detach().requires_grad_() for p in plains]
    leaves = stacks + plains
    out = op(*stacks, *plains)
    y, y_dot = torch.func.jvp(
        lambda *x: ref(*x, *plains), tuple(s[0] for s in stacks), tuple(s[1] for s in stacks)
    )
    assert relative_error(out[0], y) <= tolerance
    assert relative_error(out[1], y_dot) <= tolerance
    for halves in ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0)):
        bar = randn(*out.shape, seed=7) * torch.tensor(halves).view(2, *[1] * (out.dim() - 1))
        got = torch.autograd.grad(out, leaves, bar, retain_graph=True)
        expected = torch.autograd.grad((y, y_dot), leaves, (bar[0], bar[1]), retain_graph=True)
        for mine, theirs in zip(got, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):  # primal and tangent halves apart
                assert relative_error(a, b) <= tolerance


SHAPES = [(5, 8), (1, 1), (7,), (2, 3, 33), (1, 64), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(shape, affine):
    weight = [randn(shape[-1], seed=3)] if affine else []
    check(
        lambda x, w=None: ops.rms_norm(x, w, 1e-5),
        lambda x, w=None: reference.rms_norm(x, w, 1e-5),
        [randn(2, *shape)],
        weight,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [2, 1, 0])
def test_layer_norm(shape, affine):
    plains = [randn(shape[-1], seed=3), randn(shape[-1], seed=4)][:affine]
    check(
        lambda x, w=None, b=None: ops.layer_norm(x, w, b, 1e-5),
        lambda x, w=None, b=None: reference.layer_norm(x, w, b, 1e-5),
        [randn(2, *shape)],
        plains,
    )


@pytest.mark.parametrize("shape", [(5, 8), (1, 1), (7,), (2, 3, 33)], ids=str)
def test_softmax(shape):
    check(ops.softmax, reference.softmax, [3 * randn(2, *shape)])


def test_softmax_of_a_row_of_minus_infinity_is_that_of_torch():
    x = randn(2, 3, 4)
    x[0, 1] = -torch.inf
    torch.testing.assert_close(ops.softmax(x)[0], torch.softmax(x[0], -1), equal_nan=True)


@pytest.mark.parametrize("name", sorted(DERIVATIVES))
def test_pointwise(name):
    x = randn(2, 4, 5)
    if name in ("log", "sqrt", "rsqrt", "reciprocal"):
        x[0] = x[0].abs() + 0.5
    check(lambda s: ops.pointwise(s, name), lambda s: reference.pointwise(s, name), [x])


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated(name):
    check(
        lambda g, u: ops.gated(g, u, name),
        lambda g, u: reference.gated(g, u, name),
        [randn(2, 3, 5), randn(2, 3, 5, seed=1)],
    )


def test_functional_rms_norm_has_torchs_default_eps_and_dtype():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = 0.05 * randn(2, 3, 8, dtype=dtype)
        for weight in (None, torch.ones(8), torch.ones(8, dtype=dtype)):
            plain = F.rms_norm(x[0], (8,), weight)
            out = F.rms_norm(Dual(x), (8,), weight)
            assert out.dtype == plain.dtype
            torch.testing.assert_close(out.primal, plain)


def test_add_bias_leaves_the_tangent_alone():
    x, bias = randn(2, 3, 5), randn(5, seed=1).requires_grad_()
    out = ops.add_bias(x.clone(), bias)
    assert torch.equal(out[1], x[1])
    assert torch.equal(out[0], x[0] + bias)
    bar = randn(2, 3, 5, seed=2)
    (grad,) = torch.autograd.grad(out, bias, bar)
    assert torch.equal(grad, bar[0].sum(0))


def test_ops_name_what_does_not_fit():
    with pytest.raises(ValueError, match="name must be one of"):
        ops.pointwise(randn(2, 3), "swish")
    with pytest.raises(ValueError, match="u must have g's shape"):
        ops.gated(randn(2, 3), randn(2, 4))
    with pytest.raises(ValueError, match="activation must be one of"):
        ops.gated(randn(2, 3), randn(2, 3), "swish")
    q, k = randn(2, 1, 3, 4, 8), randn(2, 1, 2, 4, 8)
    with pytest.raises(ValueError, match="multiple of those of k"):
        ops.attention(q, k, k)
    with pytest.raises(ValueError, match="expected q"):
        ops.attention(q, k[..., :4], k)


def attention_inputs(batch, heads, kv_heads, length, keys, width, value_width=None):
    return [
        randn(2, batch, heads, length, width),
        randn(2, batch, kv_heads, keys, width, seed=1),
        randn(2, batch, kv_heads, keys, value_width or width, seed=2),
    ]


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "keys", "width"),
    [(2, 4, 4, 7, 7, 8), (1, 1, 1, 1, 1, 4), (2, 4, 2, 5, 9, 8), (1, 6, 1, 9, 5, 16)],
    ids=["B2-H4-S7", "one-token", "gqa-S5-K9", "mqa-S9-K5"],
)
@pytest.mark.parametrize("masking", ["none", "causal", "boolean", "additive"])
def test_attention(batch, heads, kv_heads, length, keys, width, masking):
    mask = None
    if masking == "boolean":
        mask = randn(batch, 1, length, keys, seed=5) > -0.5
        mask[..., 0] = True
    elif masking == "additive":
        mask = randn(heads, length, keys, seed=5)
    causal = masking == "causal"
    check(
        lambda q, k, v: ops.attention(q, k, v, mask, causal),
        lambda q, k, v: reference.attention(q, k, v, mask, causal),
        attention_inputs(batch, heads, kv_heads, length, keys, width),
    )


def test_attention_with_a_scale_and_wider_values():
    check(
        lambda q, k, v: ops.attention(q, k, v, scale=0.3),
        lambda q, k, v: reference.attention(q, k, v, scale=0.3),
        attention_inputs(1, 2, 2, 4, 4, 8, 12),
    )


def test_attention_on_strided_slices_of_one_projection():
    packed = randn(2, 2, 5, 3, 4, 8)
    stacks = [packed[:, :, :, i].transpose(2, 3) for i in range(3)]
    assert not stacks[0].is_contiguous()
    check(
        lambda q, k, v: ops.attention(q, k, v, causal=True),
        lambda q, k, v: reference.attention(q, k, v, causal=True),
        stacks,
    )


@pytest.mark.parametrize("form", ["boolean", "additive"])
def test_fully_masked_rows_give_zero_and_no_gradient(form):
    q, k, v = (x.requires_grad_() for x in attention_inputs(1, 2, 2, 4, 4, 8))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    if form == "additive":
        mask = torch.zeros(4, 4, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    out = ops.attention(q, k, v, mask)
    assert torch.equal(out[:, :, :, 2], torch.zeros_like(out[:, :, :, 2]))
    grads = torch.autograd.grad(out, (q, k, v), randn(*out.shape))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert torch.equal(grads[0][:, :, :, 2], torch.zeros_like(grads[0][:, :, :, 2]))


def test_attention_survives_large_logits():
    q, k, v = attention_inputs(1, 1, 1, 6, 6, 8)
    out = ops.attention((100 * q).float(), (100 * k).float(), v.float(), causal=True)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_error_is_at_most_twice_that_of_eager(dtype):
    """Against fp64 on the same rounded inputs; eager is torch.func.jvp + autograd in that dtype."""
    cases = {
        "rms_norm": (
            lambda x, w: ops.rms_norm(x, w, 1e-5),
            lambda x, w: reference.rms_norm(x, w, 1e-5),
            [randn(2, 16, 64, dtype=dtype), randn(64, seed=1, dtype=dtype)],
            1,
        ),
        "gated": (
            ops.gated,
            lambda g, u: reference.gated(g, u, "silu"),
            [randn(2, 16, 64, dtype=dtype), randn(2, 16, 64, seed=1, dtype=dtype)],
            2,
        ),
        "gelu": (
            lambda x: ops.pointwise(x, "gelu"),
            lambda x: reference.pointwise(x, "gelu"),
            [randn(2, 16, 64, dtype=dtype)],
            1,
        ),
        "attention": (
            lambda q, k, v: ops.attention(q, k, v, causal=True),
            lambda q, k, v: reference.attention(q, k, v, causal=True),
            [x.to(dtype) for x in attention_inputs(1, 2, 2, 33, 33, 16)],
            3,
        ),
    }
    for name, (op, ref, inputs, duals) in cases.items():

        def through_torch(inputs, ref=ref, duals=duals):
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            with sdpa_kernel(SDPBackend.MATH):
                pair = torch.func.jvp(
                    lambda *x: ref(*x, *leaves[duals:]),
                    tuple(s[0] for s in leaves[:duals]),
                    tuple(s[1] for s in leaves[:duals]),
                )
            bars = [randn(*y.shape, seed=9).to(y.dtype) for y in pair]
            return [*pair, *torch.autograd.grad(pair, leaves, bars)]

        def through_op(inputs, op=op):
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            out = op(*leaves)
            bars = torch.stack([randn(*y.shape, seed=9).to(y.dtype) for y in out])
            return [out[0], out[1], *torch.autograd.grad(out, leaves, bars)]

        exact = through_torch([x.double() for x in inputs])
        eager, ours = through_torch(inputs), through_op(inputs)
        for mine, theirs, truth in zip(ours, eager, exact, strict=True):
            assert relative_error(mine, truth) <= 2 * relative_error(theirs, truth), name


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax", "gated", "attention"])
def test_gradcheck(op):
    """Finite differences know nothing of our formulas or of torch's."""
    x = randn(2, 2, 3).requires_grad_()
    weight = randn(3, seed=1).requires_grad_()
    functions = {
        "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), (x, weight)),
        "layer_norm": (lambda x, w: ops.layer_norm(x, w, w, 1e-5), (x, weight)),
        "softmax": (ops.softmax, (x,)),
        "gated": (ops.gated, (x, randn(2, 2, 3, seed=2).requires_grad_())),
        "attention": (
            lambda q, k, v: ops.attention(q, k, v, causal=True),
            tuple(s.requires_grad_() for s in attention_inputs(1, 2, 1, 3, 3, 2)),
        ),
    }
    function, inputs = functions[op]
    assert torch.autograd.gradcheck(function, inputs)
