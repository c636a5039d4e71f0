"""What every dual result is compared with: torch.func.jvp of a function, and autograd of that."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stars_fast import Dual
from stars_fast.dual.patches import surroundings
from stars_fast.ops import reference

# Relative error in the L2 norm. fp64: a few hundred roundings of 1e-16 in a block.
FP64 = 1e-9


def relative_error(got, expected):
    """||got - expected|| / ||expected||, and 0 where both vanish."""
    got, expected = got.detach().double(), expected.detach().double()
    assert got.shape == expected.shape
    difference, size = (got - expected).norm(), expected.norm()
    # Gradients that vanish identically (a shift of the logits) are rounding noise on both sides.
    return (difference / size.clamp_min(1e-12)).item() if difference > 1e-13 else 0.0


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


def jvp_and_gradients(f, h, v, leaves, y_bar, y_dot_bar):
    """Value, tangent and the gradients of <y_bar, y> + <y_dot_bar, y_dot> by torch alone."""
    with sdpa_kernel(SDPBackend.MATH), WrittenOutNorm():
        y, y_dot = torch.func.jvp(f, (h,), (v,))
        loss = (y * y_bar).sum() + (y_dot * y_dot_bar).sum()
        return y, y_dot, torch.autograd.grad(loss, leaves, allow_unused=True)


def assert_dual_matches(run, f, h, v, leaves, tolerance=FP64):
    """`run(stack) -> stack` against `f`: value, tangent and the gradient of every leaf, for
    cotangents of both outputs and of each alone."""
    generator = torch.Generator().manual_seed(1)
    shape = f(h.detach()).shape

    def cotangent():
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(h.dtype)

    zero = torch.zeros(shape, dtype=h.dtype)
    for y_bar, y_dot_bar in ((cotangent(), cotangent()), (zero, cotangent()), (cotangent(), zero)):
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


def attention_inputs(batch, heads, kv_heads, length, keys, width, value_width=None):
    return [
        randn(2, batch, heads, length, width),
        randn(2, batch, kv_heads, keys, width, seed=1),
        randn(2, batch, kv_heads, keys, value_width or width, seed=2),
    ]


def assert_matches_differences(f, x, seed=0):
    """`f` in a dual pass against differences of `f` itself: the value, the tangent, and the
    gradient of both by x and by the tangent in a random direction. fp64, smooth around x."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    v, y = random(x.shape), f(x)
    bar, direction, step = random((2, *y.shape)), random((2, *x.shape)), 1e-6

    def dual(stack):
        with surroundings():
            return f(Dual(stack)).stack

    def along(stack):
        return (dual(stack) * bar).sum()

    stack = torch.stack((x, v)).requires_grad_()
    out = dual(stack * 1.0)
    (grad,) = torch.autograd.grad((out * bar).sum(), stack)
    tangent = (f(x + step * v) - f(x - step * v)) / (2 * step)
    assert relative_error(out[0], y) <= 1e-12
    assert (out[1] - tangent).norm() <= 1e-7 * tangent.norm() + 1e-8
    with torch.no_grad():
        ends = along(stack + step * direction), along(stack - step * direction)
    slope = (ends[0] - ends[1]) / (2 * step)
    got = (grad * direction).sum()
    assert (got - slope).abs() <= 1e-6 * slope.abs() + 1e-6, f"{got} for {slope}"
