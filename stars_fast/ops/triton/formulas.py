"""Formulas of the dual ops on values in registers: nothing here touches memory. `csrc/dual.h` has
the same functions in C++.

(x, xd) is primal and tangent. (a, b) are the cotangents of the primal and of the tangent output;
the backward of a dual op is its ordinary backward in dual arithmetic with the two swapped. Hence
the second result of a backward depends on b alone and is the op's ordinary backward.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _silu(x):
    s = tl.sigmoid(x)
    slope = s * (1 - s)
    return x * s, s + x * slope, slope * (2 + x * (1 - 2 * s))


@triton.jit
def _gelu(x):
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327
    cumulative = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    return x * cumulative, cumulative + x * density, density * (2 - x * x)


@triton.jit
def _gelu_tanh(x):
    scale = 0.7978845608028654
    cubic = 0.044715
    # 0.5 (1 + tanh z) = sigmoid(2 z), and 1 - tanh(z)^2 = 4 sigmoid(2 z) sigmoid(-2 z).
    z = 2 * scale * x * (1 + cubic * x * x)
    half = tl.sigmoid(z)
    sech2 = 4 * half * tl.sigmoid(-z)
    dz = scale * (1 + 3 * cubic * x * x)
    curve = 6 * scale * cubic * x - 2 * (2 * half - 1) * dz * dz
    return x * half, half + 0.5 * x * sech2 * dz, sech2 * (dz + 0.5 * x * curve)


@triton.jit
def _relu(x):
    closed = x <= 0  # NaN is not, and passes as it does in torch
    return tl.where(closed, 0.0, x), tl.where(closed, 0.0, 1.0), tl.zeros_like(x)


@triton.jit
def _sigmoid(x):
    s = tl.sigmoid(x)
    slope = s * (1 - s)
    return s, slope, slope * (1 - 2 * s)


@triton.jit
def _tanh(x):
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    # 1 - e cancels near 0, where the first terms of the series are exact to fp32.
    square = x * x
    near = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    t = tl.where(tl.abs(x) < 0.125, near, tl.where(x < 0, -far, far))
    slope = 4 * e / ((1 + e) * (1 + e))
    return t, slope, -2 * t * slope


@triton.jit
def _exp(x):
    e = tl.exp(x)
    return e, e, e


@triton.jit
def _log(x):
    inverse = 1 / x
    return tl.log(x), inverse, -inverse * inverse


@triton.jit
def _sqrt(x):
    y = tl.sqrt(x)
    return y, 0.5 / y, -0.25 / (y * x)


@triton.jit
def _rsqrt(x):
    y = tl.rsqrt(x)
    return y, -0.5 * y / x, 0.75 * y / (x * x)


@triton.jit
def _reciprocal(x):
    y = 1 / x
    return y, -y * y, 2 * y * y * y


@triton.jit
def _square(x):
    return x * x, 2 * x, tl.zeros_like(x) + 2


@triton.jit
def _sin(x):
    s = tl.sin(x)
    return s, tl.cos(x), -s


@triton.jit
def _cos(x):
    c = tl.cos(x)
    return c, -tl.sin(x), -c


@triton.jit
def _erf(x):
    slope = tl.exp(-x * x) * 1.1283791670955126
    return tl.erf(x), slope, -2 * x * slope


@triton.jit
def _abs(x):
    sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
    return tl.abs(x), sign, tl.zeros_like(x)


@triton.jit
def _of_result(y, NAME: tl.constexpr):
    """y, g(y) and k(y) with f' = g(y) and f'' xd = k(y) yd: derivatives by the result."""
    if NAME == "sigmoid_result":
        first, second = y * (1 - y), 1 - 2 * y
    elif NAME == "tanh_result":
        first, second = (1 - y) * (1 + y), -2 * y
    elif NAME == "exp_result":
        first, second = y, tl.full(y.shape, 1.0, y.dtype)
    elif NAME == "sqrt_result":
        first, second = 0.5 / y, -0.5 / (y * y)
    elif NAME == "rsqrt_result":
        first, second = -0.5 * y * y * y, -1.5 * y * y
    else:
        tl.static_assert(NAME == "reciprocal_result", "unknown elementwise function")
        first, second = -y * y, -2 * y
    return y, first, second


@triton.jit
def jet(x, NAME: tl.constexpr):
    """f(x), f'(x) and f''(x) of the elementwise function NAME."""
    if NAME == "silu":
        y, first, second = _silu(x)
    elif NAME == "gelu":
        y, first, second = _gelu(x)
    elif NAME == "gelu_tanh":
        y, first, second = _gelu_tanh(x)
    elif NAME == "relu":
        y, first, second = _relu(x)
    elif NAME == "identity":
        y, first, second = x, tl.full(x.shape, 1.0, x.dtype), tl.zeros_like(x)
    elif NAME == "sigmoid":
        y, first, second = _sigmoid(x)
    elif NAME == "tanh":
        y, first, second = _tanh(x)
    elif NAME == "exp":
        y, first, second = _exp(x)
    elif NAME == "log":
        y, first, second = _log(x)
    elif NAME == "sqrt":
        y, first, second = _sqrt(x)
    elif NAME == "rsqrt":
        y, first, second = _rsqrt(x)
    elif NAME == "reciprocal":
        y, first, second = _reciprocal(x)
    elif NAME == "square":
        y, first, second = _square(x)
    elif NAME == "sin":
        y, first, second = _sin(x)
    elif NAME == "cos":
        y, first, second = _cos(x)
    elif NAME == "erf":
        y, first, second = _erf(x)
    elif NAME == "abs":
        y, first, second = _abs(x)
    else:
        y, first, second = _of_result(x, NAME)
    return y, first, second


@triton.jit
def pointwise(x, xd, NAME: tl.constexpr):
    """y, yd."""
    f, f1, _ = jet(x, NAME)
    return f, f1 * xd


@triton.jit
def pointwise_backward(a, b, x, xd, NAME: tl.constexpr):
    """x_bar, xd_bar."""
    _, f1, f2 = jet(x, NAME)
    return f1 * a + f2 * xd * b, f1 * b


@triton.jit
def gated(g, gd, u, ud, NAME: tl.constexpr):
    """y, yd."""
    f, f1, _ = jet(g, NAME)
    return f * u, f1 * gd * u + f * ud


@triton.jit
def gated_backward(a, b, g, gd, u, ud, NAME: tl.constexpr):
    """g_bar, gd_bar, u_bar, ud_bar."""
    f, f1, f2 = jet(g, NAME)
    slope = f1 * u
    g_bar = a * slope + b * (f2 * gd * u + f1 * ud)
    return g_bar, b * slope, a * f + b * f1 * gd, b * f


@triton.jit
def normalise(x, xd, r, c):
    """n, nd from r = rsqrt(mean(x^2) + eps) and c = mean(n r xd)."""
    n = r * x
    return n, r * xd - n * c


@triton.jit
def normalise_backward(a, b, n, nd, r, c, s, sd):
    """x_bar, xd_bar from the cotangents of n, nd and s = mean(b n), sd = mean(a n + b nd)."""
    xd_bar = r * (b - n * s)
    return r * (a - nd * s - n * sd) - c * xd_bar, xd_bar


@triton.jit
def softmax_backward(a, b, y, yd, d, dd):
    """x_bar, xd_bar from d = sum(y b), dd = sum(y a + yd b)."""
    e = b - d
    return yd * e + y * (a - dd), y * e


@triton.jit
def rotate(x1, x2, cos1, cos2, sin1, sin2, TRANSPOSE: tl.constexpr):
    """The two halves of a head, rotated; with TRANSPOSE by the transpose of that map."""
    if TRANSPOSE:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    return y1, y2
