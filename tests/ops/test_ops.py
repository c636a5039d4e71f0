"""Every op against its reference in fp64: value, tangent, and the cotangents of both."""

import pytest
import torch
import torch.nn.functional as F
from oracle import attention_inputs, check, randn, relative_error
from torch.nn.attention import SDPBackend, sdpa_kernel

from stars_fast import Dual, ops
from stars_fast.ops import reference
from stars_fast.ops.pointwise import DERIVATIVES

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
    with pytest.raises(ValueError, match="name: expected one of"):
        ops.pointwise(randn(2, 3), "swish")
    with pytest.raises(ValueError, match="u: expected g's shape"):
        ops.gated(randn(2, 3), randn(2, 4))
    with pytest.raises(ValueError, match="activation: expected one of"):
        ops.gated(randn(2, 3), randn(2, 3), "swish")
    with pytest.raises(ValueError, match="expected branch's shape"):
        ops.sandwich(randn(2, 3, 4), randn(2, 4), None, randn(4), 1e-5, 1e-5)
    with pytest.raises(ValueError, match=r"weight: expected shape \[4\], got \[5\]"):
        ops.rms_norm(randn(2, 3, 4), randn(5), 1e-5)
    with pytest.raises(ValueError, match=r"x: expected a stack \[2, ...\], got \[3, 4\]"):
        ops.softmax(randn(3, 4))
    with pytest.raises(TypeError, match="x: expected floating point"):
        ops.pointwise(randn(2, 3).to(torch.complex128), "sin")
    with pytest.raises(ValueError, match="D even"):
        ops.rotary(randn(2, 1, 2, 3, 4), randn(1, 2, 4), randn(1, 2, 4))


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


def test_gradcheck():
    """Finite differences know nothing of our formulas or of torch's."""
    x, y, z = (randn(2, 2, 4, seed=i).requires_grad_() for i in range(3))
    w, b = (randn(4, seed=i).requires_grad_() for i in (3, 4))
    heads = randn(2, 1, 2, 3, 4).requires_grad_()
    angles = randn(1, 3, 4, seed=5), randn(1, 3, 4, seed=6)
    functions = {
        "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), (x, w)),
        "layer_norm": (lambda x, w, b: ops.layer_norm(x, w, b, 1e-5), (x, w, b)),
        "softmax": (ops.softmax, (x,)),
        "pointwise": (lambda x: ops.pointwise(x, "gelu"), (x,)),
        "gated": (ops.gated, (x, y)),
        "sandwich": (lambda *t: ops.sandwich(*t, 1e-5, 1e-4), (x, y, w, b)),
        "pre-norm": (lambda x, y, w: ops.sandwich(x, y, None, w, 1e-5, 1e-4), (x, y, w)),
        "rotary": (lambda x: ops.rotary(x, *angles), (heads,)),
        "row_squares": (ops.row_squares, (z,)),
        "attention": (
            lambda q, k, v: ops.attention(q, k, v, causal=True),
            tuple(s.requires_grad_() for s in attention_inputs(1, 2, 1, 3, 3, 2)),
        ),
    }
    for name, (function, inputs) in functions.items():
        assert torch.autograd.gradcheck(function, inputs), name


@pytest.mark.parametrize("norm_out", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (1, 1), (2, 3, 33)], ids=str)
def test_sandwich(shape, norm_out):
    weights = [randn(shape[-1], seed=4), randn(shape[-1], seed=3)][: 1 + norm_out]

    def op(branch, residual, w_in, w_out=None):
        h, x = ops.sandwich(branch, residual, w_out, w_in, 1e-5, 1e-4)
        return torch.cat((h, x), -1)

    def ref(branch, residual, w_in, w_out=None):
        branch = branch if w_out is None else reference.rms_norm(branch, w_out, 1e-5)
        h = residual + branch
        return torch.cat((h, reference.rms_norm(h, w_in, 1e-4)), -1)

    check(op, ref, [randn(2, *shape), randn(2, *shape, seed=1)], weights)


@pytest.mark.parametrize("batch", [1, 2])
def test_rotary(batch):
    cos, sin = randn(batch, 5, 8, seed=1), randn(batch, 5, 8, seed=2)
    x = randn(2, 2, 5, 3, 8).transpose(2, 3)
    check(
        lambda x: ops.rotary(x, cos, sin),
        lambda x: reference.rotary(x, cos, sin),
        [x],
    )
    torch.testing.assert_close(ops.rotary(x[0], cos, sin), reference.rotary(x[0], cos, sin))


def test_primal_only_ops_are_the_primal_half():
    """The same numbers and gradients as the reference, on ordinary tensors."""
    x, y, w, b = randn(3, 8), randn(3, 8, seed=1), randn(8, seed=2), randn(8, seed=3)
    plain = {"dual": False}

    def chain(branch, residual, w_out, w_in):
        h = residual + reference.rms_norm(branch, w_out, 1e-5)
        return torch.cat((h, reference.rms_norm(h, w_in, 1e-5)))

    pairs = [
        (
            lambda x, w: ops.rms_norm(x, w, 1e-5, **plain),
            lambda x, w: reference.rms_norm(x, w, 1e-5),
            (x, w),
        ),
        (
            lambda x, w, b: ops.layer_norm(x, w, b, 1e-5, **plain),
            lambda x, w, b: reference.layer_norm(x, w, b, 1e-5),
            (x, w, b),
        ),
        (lambda x: ops.softmax(x, **plain), reference.softmax, (x,)),
        (
            lambda x: ops.pointwise(x, "gelu", **plain),
            lambda x: reference.pointwise(x, "gelu"),
            (x,),
        ),
        (
            lambda x, y: ops.gated(x, y, "silu", **plain),
            lambda x, y: reference.gated(x, y, "silu"),
            (x, y),
        ),
        (
            lambda *t: torch.cat(ops.sandwich(*t, 1e-5, 1e-5, **plain)),
            chain,
            (x, y, w, b),
        ),
    ]
    for op, ref, inputs in pairs:
        leaves = [t.clone().requires_grad_() for t in inputs]
        mine, theirs = op(*leaves), ref(*leaves)
        torch.testing.assert_close(mine, theirs)
        bar = randn(*mine.shape, seed=9)
        for a, b in zip(
            torch.autograd.grad(mine, leaves, bar),
            torch.autograd.grad(theirs, leaves, bar),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
