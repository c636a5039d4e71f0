"""What every dual result is compared with: torch.func.jvp of a function in fp64, and autograd of
that. Where torch itself is wrong, the norm written out (`WrittenOutNorm`) or central differences
(`assert_matches_differences`); `dual/high_precision.py` has dozens of digits, for saturated inputs.
"""

import torch
import torch.nn.functional as F
from tolerances import BLOCK, GRADIENT_BY_DIFFERENCES, OPS, TANGENT_BY_DIFFERENCES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stars_fast import fused_jvp
from stars_fast.ops import reference

# Cotangents of both halves of a pair, and of each alone.
HALVES = {"both": (1.0, 1.0), "tangent": (0.0, 1.0), "primal": (1.0, 0.0)}


def relative_error(got, expected):
    """||got - expected|| / ||expected||; 0 where both vanish, NaN where one of them has a NaN."""
    got, expected = got.detach().double(), expected.detach().double()
    assert got.shape == expected.shape
    difference, size = (got - expected).norm(), expected.norm()
    # Gradients that vanish identically (a shift of the logits) are rounding noise on both sides.
    return 0.0 if difference <= 1e-13 else (difference / size.clamp_min(1e-12)).item()


class KeepDouble(TorchFunctionMode):
    """Library norms and softmaxes ask for fp32 whatever the input: in fp64 tests that rounding
    would hide the comparison, so inside this mode a double stays a double."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        is_double = (
            bool(args) and isinstance(args[0], torch.Tensor) and (args[0].dtype == torch.float64)
        )
        if is_double:
            if func is torch.Tensor.float:
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if func is torch.Tensor.matmul:  # of a table and positions, which were integers
                args = tuple(a.double() for a in args)
        return func(*args, **kwargs)


class WrittenOutNorm(TorchFunctionMode):
    """torch 2.13 takes the statistics that F.layer_norm saves for constants in the gradient of its
    tangent (a test in dual/test_blocks.py shows it), so the comparison is with the norm written
    out."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.layer_norm:
            defaults = {"weight": None, "bias": None, "eps": 1e-5}
            names = ("input", "normalized_shape", *defaults)
            given = {**defaults, **dict(zip(names, args, strict=False)), **(kwargs or {})}
            return reference.layer_norm(given["input"], *(given[name] for name in defaults))
        return func(*args, **(kwargs or {}))


class WrittenOutAttention(TorchFunctionMode):
    """Torch's own attention has NaN second derivatives where a query sees no key (`_safe_softmax`,
    seen in torch 2.13 and 2.14.1), so the comparison is with attention written out, in which such a
    row is a constant."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def attention(q, k, v, attn_mask=None, dropout_p=0.0):
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if attn_mask is not None:
            is_boolean = attn_mask.dtype == torch.bool
            logits = (
                logits.masked_fill(~attn_mask, -torch.inf) if is_boolean else logits + attn_mask
            )
        sees = (logits > -torch.inf).any(-1, keepdim=True)
        weights = torch.where(sees, logits, 0.0).softmax(-1) * sees
        return F.dropout(weights, dropout_p) @ v


def randn(*shape, seed=0, dtype=torch.float64, device="cpu"):
    """Normal numbers, drawn in fp64 so that a narrower dtype has them rounded."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def cotangents(shape, seed=7, dtype=torch.float64, device="cpu"):
    """Cotangents [2, ...] for a pair of that shape: of both halves, and of each alone."""
    full = randn(*shape, seed=seed, dtype=dtype, device=device)
    return [full * full.new_tensor(h).view(2, *[1] * (len(shape) - 1)) for h in HALVES.values()]


def dual_of(f, stacks, plains=()):
    """The outputs of f(*primals, *plains) with their tangents, each stacked [2, ...]."""
    primal, tangent = torch.func.jvp(
        lambda *x: f(*x, *plains), tuple(s[0] for s in stacks), tuple(s[1] for s in stacks)
    )
    if isinstance(primal, torch.Tensor):
        return torch.stack((primal, tangent))
    return tuple(torch.stack(pair) for pair in zip(primal, tangent, strict=True))


def jvp_and_gradients(f, h, v, leaves, y_bar, y_dot_bar):
    """Value, tangent and the gradients of <y_bar, y> + <y_dot_bar, y_dot> by torch alone."""
    with sdpa_kernel(SDPBackend.MATH), WrittenOutNorm():
        y, y_dot = torch.func.jvp(f, (h,), (v,))
        loss = (y * y_bar).sum() + (y_dot * y_dot_bar).sum()
        return y, y_dot, torch.autograd.grad(loss, leaves, allow_unused=True)


def assert_dual_matches(run, f, h, v, leaves, tolerance=BLOCK):
    """`run(stack) -> stack` against `f`: value, tangent and the gradient of every leaf, for
    cotangents of both outputs and of each alone."""
    for y_bar, y_dot_bar in cotangents((2, *f(h.detach()).shape), seed=1, dtype=h.dtype):
        y, y_dot, expected = jvp_and_gradients(f, h, v, leaves, y_bar, y_dot_bar)
        out = run(torch.stack((h, v)))
        assert relative_error(out[0], y) <= tolerance
        assert relative_error(out[1], y_dot) <= tolerance
        loss = (out[0] * y_bar).sum() + (out[1] * y_dot_bar).sum()
        got = torch.autograd.grad(loss, leaves, allow_unused=True)
        for leaf, mine, theirs in zip(leaves, got, expected, strict=True):
            if mine is None or theirs is None:
                # torch may say None where the other says zero.
                for grad in (mine, theirs):
                    assert grad is None or grad.abs().max() <= 1e-12
            else:
                error = relative_error(mine, theirs)
                assert error <= tolerance, f"gradient of {list(leaf.shape)}: {error}"


def check(op, ref, stacks, plains=(), tolerance=OPS[torch.float64]):
    """`op(*stacks, *plains)` against the dual of `ref` and autograd of that, halves apart."""
    stacks = [s.detach().requires_grad_() for s in stacks]
    plains = [p.detach().requires_grad_() for p in plains]
    leaves = stacks + plains
    out, expected = op(*stacks, *plains), dual_of(ref, stacks, plains)
    for mine, theirs in zip(out, expected, strict=True):
        assert relative_error(mine, theirs) <= tolerance
    for bar in cotangents(out.shape):
        got = torch.autograd.grad(out, leaves, bar, retain_graph=True)
        wanted = torch.autograd.grad(expected, leaves, bar, retain_graph=True)
        for mine, theirs in zip(got, wanted, strict=True):
            for a, b in zip(mine, theirs, strict=True):  # primal and tangent halves apart
                assert relative_error(a, b) <= tolerance


def attention_inputs(batch, heads, kv_heads, length, keys, width, value_width=None):
    return [
        randn(2, batch, heads, length, width),
        randn(2, batch, kv_heads, keys, width, seed=1),
        randn(2, batch, kv_heads, keys, value_width or width, seed=2),
    ]


def assert_matches_differences(f, h, leaves=(), gradient_error=GRADIENT_BY_DIFFERENCES):
    """`fused_jvp(f, h, v)` against a judge that knows no derivatives, in fp64: the value against
    eager to rounding, the tangent against a central difference of eager, and the gradient of
    <y_bar, y> + <y_dot_bar, J v> in h, v and every leaf against a central difference of that
    number (its value and tangent were just held against eager), along a random direction each."""
    step, v = 1e-6, randn(*h.shape, seed=4)

    def eager(x):
        with torch.no_grad():
            return f(x.clone())

    inputs = h.clone().requires_grad_(), v.clone().requires_grad_()
    y, y_dot = fused_jvp(f, *inputs)
    assert relative_error(y, eager(h)) <= OPS[torch.float64]
    numeric = (eager(h + step * v) - eager(h - step * v)) / (2 * step)
    torch.testing.assert_close(
        y_dot, numeric, rtol=TANGENT_BY_DIFFERENCES, atol=TANGENT_BY_DIFFERENCES
    )
    bars = randn(*y.shape, seed=5), randn(*y.shape, seed=6)

    def number(y, y_dot):
        return (y * bars[0]).sum() + (y_dot * bars[1]).sum()

    tensors = *inputs, *leaves
    grads = torch.autograd.grad(number(y, y_dot), tensors, allow_unused=True)

    def moved(tensor, change):
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor.add_(change)
            result = number(*fused_jvp(f, inputs[0].detach().clone(), inputs[1].detach()))
            tensor.copy_(before)
        return result

    for i, (tensor, grad) in enumerate(zip(tensors, grads, strict=True)):
        direction = randn(*tensor.shape, seed=7 + i)
        slope = (moved(tensor, step * direction) - moved(tensor, -step * direction)) / (2 * step)
        got = torch.zeros(()) if grad is None else (grad * direction).sum()
        torch.testing.assert_close(
            got.double(), slope.double(), rtol=gradient_error, atol=gradient_error
        )
