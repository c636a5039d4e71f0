"""A judge that knows no derivatives: eager values and their central differences, in fp64."""

import torch

from stars_fast import fused_jvp


def numbers(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def derivative(f, x, direction, step):
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


def assert_matches_differences(f, h, leaves=(), tangent_error=1e-7, gradient_error=1e-5):
    """`fused_jvp(f, h, v)` against eager: the value to rounding, the tangent against a central
    difference, and the gradient of <y_bar, y> + <y_dot_bar, J v> in h and in every leaf against a
    central difference of that number, along a random direction each.

    The errors are those of the differences: steps of 1e-5 (first) and 1e-4 (of first) leave 1e-10
    and 1e-8 of truncation and about as much of cancellation, for values of about 1.
    """
    v = numbers(*h.shape, seed=4)

    def value(x):
        with torch.no_grad():
            return f(x.clone())

    def rate(x):
        return derivative(value, x, v, 1e-5)

    given = h.clone().requires_grad_()
    out, jv = fused_jvp(f, given, v)
    torch.testing.assert_close(out, value(h), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(jv, rate(h), rtol=tangent_error, atol=tangent_error)
    y_bar, y_dot_bar = numbers(*out.shape, seed=5), numbers(*out.shape, seed=6)
    grads = torch.autograd.grad(
        (out * y_bar).sum() + (jv * y_dot_bar).sum(), (given, *leaves), allow_unused=True
    )

    def number(x):
        return (value(x) * y_bar).sum() + (rate(x) * y_dot_bar).sum()

    def moved(leaf, direction, step):
        before = leaf.detach().clone()
        with torch.no_grad():
            leaf.add_(direction, alpha=step)
            result = number(h)
            leaf.copy_(before)
        return result

    for i, (leaf, grad) in enumerate(zip((given, *leaves), grads, strict=True)):
        direction = numbers(*leaf.shape, seed=7 + i)
        if i == 0:
            expected = derivative(number, h, direction, 1e-4)
        else:
            ends = moved(leaf, direction, 1e-4), moved(leaf, direction, -1e-4)
            expected = (ends[0] - ends[1]) / 2e-4
        got = torch.zeros(()) if grad is None else (grad * direction).sum()
        torch.testing.assert_close(
            got.double(), expected, rtol=gradient_error, atol=10 * gradient_error
        )
