"""Derivatives to dozens of digits: central differences in mpmath, which torch brings along."""

import mpmath
import numpy as np
import torch

mpmath.mp.dps = 60
_STEP = mpmath.mpf(10) ** -20  # its square is far below any rounding of a double


def numbers(x):
    """An array of mpmath numbers, exactly those of x."""
    return np.vectorize(lambda z: mpmath.mpf(float(z)), otypes=[object])(np.asarray(x))


def each(f):
    """f of a number on arrays."""
    return np.vectorize(f, otypes=[object])


def rows(f):
    """f of a row on [M, N]."""
    return lambda x: np.array([np.atleast_1d(f(row)) for row in x], object)


def matrix(f):
    """f of an mpmath matrix on [M, N]."""

    def apply(x):
        out = f(mpmath.matrix(x.tolist()))
        return np.array(out.tolist() if isinstance(out, mpmath.matrix) else [out], object)

    return apply


def truth(f, x, v, y_bar, y_dot_bar):
    """y, y_dot, x_bar and x_dot_bar of `f`, which maps an array of mpmath numbers to another, for
    the loss <y_bar, y> + <y_dot_bar, y_dot>; each rounded once to fp64."""
    x, v, y_bar, y_dot_bar = map(numbers, (x, v, y_bar, y_dot_bar))
    step = _STEP
    y, y_dot = f(x), (f(x + step * v) - f(x - step * v)) / (2 * step)
    x_bar, x_dot_bar = np.empty(x.shape, object), np.empty(x.shape, object)
    for place in np.ndindex(x.shape):
        e = np.full(x.shape, mpmath.mpf(0), object)
        e[place] = step
        up, down = f(x + e), f(x - e)
        slope = (up - down) / (2 * step)
        bend = f(x + e + step * v) - f(x - e + step * v)
        bend = (bend - f(x + e - step * v) + f(x - e - step * v)) / (4 * step * step)
        x_dot_bar[place] = (y_dot_bar * slope).sum()
        x_bar[place] = (y_bar * slope + y_dot_bar * bend).sum()
    return tuple(
        torch.tensor(np.vectorize(float)(out), dtype=torch.float64)
        for out in (y, y_dot, x_bar, x_dot_bar)
    )
