"""Ops at large, small, equal, zero and saturated inputs, against sixty digits; at kinks, against
the gradient of eager PyTorch."""

import itertools
import math
import warnings

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from high_precision import each, matrix, numbers, rows, truth
from mpmath import mpf

from stars_fast.dual import Dual
from stars_fast.dual.patches import surroundings

special, linalg = torch.special, torch.linalg
INF = math.inf


def random(shape, generator, dtype=torch.float64):
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def dual(f, x, v, y_bar, y_dot_bar):
    """y, y_dot, x_bar and x_dot_bar by the dual pass."""
    stack = torch.stack((x, v)).requires_grad_()
    with surroundings():
        out = f(Dual(stack)).stack
    (bar,) = torch.autograd.grad(out, stack, torch.stack((y_bar, y_dot_bar)))
    return (*out.detach().unbind(0), *bar.unbind(0))


# Roundings of the dtype that a result may be off by, relative to it; where it nearly vanishes,
# relative to the unit size of the directions.
ROUNDINGS = 3000


def check(f, exact, x):
    generator = torch.Generator().manual_seed(1)
    v = random(x.shape, generator, x.dtype)
    y_bar, y_dot_bar = (random(f(x).shape, generator, x.dtype) for _ in range(2))
    expected = truth(exact, x, v, y_bar, y_dot_bar)
    got = dual(f, x, v, y_bar, y_dot_bar)
    eps = torch.finfo(x.dtype).eps
    for name, mine, theirs in zip(("y", "y_dot", "x_bar", "x_dot_bar"), got, expected, strict=True):
        largest = torch.finfo(x.dtype).max ** 0.5
        if not theirs.isfinite().all() or theirs.abs().max() > largest:
            continue  # beyond the dtype
        error = (mine.double() - theirs).norm()
        assert error <= ROUNDINGS * eps * (theirs.norm() + 0.1), f"{name}: {error / theirs.norm()}"


def sigmoid(z):
    return 1 / (1 + mpmath.exp(-z))


def softplus(z):
    return mpmath.log1p(mpmath.exp(z))


def normal(z):
    return mpmath.erfc(-z / mpmath.sqrt(2)) / 2


def positive(x):
    return x.abs() + 1e-6


def within(x):
    return torch.tanh(x) * (1 - 1e-5)


def share(x):
    return torch.sigmoid(x).clamp(1e-5, 1 - 1e-5)


def anywhere(x):
    return x


def linear(x):
    """Where softplus may be taken for the identity: at torch's 20 it is 2e-9 away."""
    return 20 if x.dtype == torch.float32 else 40


# name -> torch's function, of one number in mpmath, and where it is defined.
ELEMENTWISE = {
    "logsigmoid": (F.logsigmoid, lambda z: -softplus(-z), anywhere),
    "mish": (F.mish, lambda z: z * mpmath.tanh(softplus(z)), anywhere),
    "elu": (F.elu, lambda z: z if z > 0 else mpmath.expm1(z), anywhere),
    "celu": (
        lambda x: F.celu(x, 1.5),
        lambda z: z if z > 0 else mpf(1.5) * mpmath.expm1(z / mpf(1.5)),
        anywhere,
    ),
    "gelu": (F.gelu, lambda z: z * normal(z), anywhere),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda z: (
            z / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (z + mpf("0.044715") * z**3)))
        ),
        anywhere,
    ),
    "silu": (F.silu, lambda z: z * sigmoid(z), anywhere),
    "sigmoid": (torch.sigmoid, sigmoid, anywhere),
    "tanh": (torch.tanh, mpmath.tanh, anywhere),
    "tanhshrink": (F.tanhshrink, lambda z: z - mpmath.tanh(z), anywhere),
    "softsign": (F.softsign, lambda z: z / (1 + abs(z)), anywhere),
    "softplus": (lambda x: F.softplus(x, threshold=linear(x)), softplus, anywhere),
    "softplus-beta": (
        lambda x: F.softplus(x, beta=2.0, threshold=linear(x)),
        lambda z: softplus(2 * z) / 2,
        anywhere,
    ),
    "sinc": (torch.sinc, lambda z: mpmath.sinc(mpmath.pi * z), anywhere),
    "exp": (torch.exp, mpmath.exp, anywhere),
    "expm1": (torch.expm1, mpmath.expm1, anywhere),
    "exp2": (torch.exp2, lambda z: mpf(2) ** z, anywhere),
    "log1p": (torch.log1p, mpmath.log1p, positive),
    "log": (torch.log, mpmath.log, positive),
    "log2": (torch.log2, lambda z: mpmath.log(z, 2), positive),
    "log10": (torch.log10, mpmath.log10, positive),
    "sqrt": (torch.sqrt, mpmath.sqrt, positive),
    "rsqrt": (torch.rsqrt, lambda z: 1 / mpmath.sqrt(z), positive),
    "reciprocal": (torch.reciprocal, lambda z: 1 / z, positive),
    "entr": (special.entr, lambda z: -z * mpmath.log(z), positive),
    "logit": (torch.logit, lambda z: mpmath.log(z / (1 - z)), share),
    "erf": (torch.erf, mpmath.erf, anywhere),
    "erfc": (torch.erfc, mpmath.erfc, anywhere),
    "erfinv": (torch.erfinv, mpmath.erfinv, within),
    "lgamma": (torch.lgamma, mpmath.loggamma, lambda x: positive(x) + 0.5),
    "i0": (torch.i0, lambda z: mpmath.besseli(0, z), anywhere),
    "i0e": (special.i0e, lambda z: mpmath.besseli(0, z) * mpmath.exp(-abs(z)), anywhere),
    "i1": (special.i1, lambda z: mpmath.besseli(1, z), anywhere),
    "i1e": (special.i1e, lambda z: mpmath.besseli(1, z) * mpmath.exp(-abs(z)), anywhere),
    "ndtr": (special.ndtr, normal, anywhere),
    "log_ndtr": (special.log_ndtr, lambda z: mpmath.log(normal(z)), anywhere),
    "asinh": (torch.asinh, mpmath.asinh, anywhere),
    "acosh": (torch.acosh, mpmath.acosh, lambda x: 1 + positive(x)),
    "atanh": (torch.atanh, mpmath.atanh, within),
    "asin": (torch.asin, mpmath.asin, within),
    "acos": (torch.acos, mpmath.acos, within),
    "atan": (torch.atan, mpmath.atan, anywhere),
    "sinh": (torch.sinh, mpmath.sinh, anywhere),
    "cosh": (torch.cosh, mpmath.cosh, anywhere),
    "pow-1.5": (lambda x: x**1.5, lambda z: z ** mpf(1.5), positive),
    "pow-3": (lambda x: x**3, lambda z: z**3, anywhere),
    "pow--2": (lambda x: x**-2, lambda z: z**-2, positive),
    "rpow": (lambda x: 2.5**x, lambda z: mpf(2.5) ** z, anywhere),
    "xlogy": (lambda x: torch.xlogy(x, x), lambda z: z * mpmath.log(z), positive),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name, dtype):
    if name == "lgamma" and dtype == torch.float64:
        pytest.skip("torch's trigamma has ten digits")
    f, exact, domain = ELEMENTWISE[name]
    generator = torch.Generator().manual_seed(0)
    for size in (1e-8, 1e-3, 1.0, 10.0, 80.0):
        check(f, each(exact), domain(size * random(5, generator)).to(dtype))


# -- rows and matrices


def log_sum_exp(row):
    return mpmath.log(sum(mpmath.exp(z) for z in row))


def soft_max(row):
    return np.array([mpmath.exp(z - log_sum_exp(row)) for z in row], object)


def log_soft_max(row):
    return row - log_sum_exp(row)


def average(row):
    return sum(row) / len(row)


def variance(row, correction=1):
    return sum((z - average(row)) ** 2 for z in row) / (len(row) - correction)


def standardised(row):
    return (row - average(row)) / mpmath.sqrt(variance(row, 0) + mpf(1e-5))


def length(row, p=2):
    return sum(abs(z) ** p for z in row) ** (mpf(1) / p)


def running_product(row):
    return np.array([mpmath.fprod(row[: i + 1]) for i in range(len(row))], object)


def halves(f):
    """f of two rows on [M, 6]."""
    return lambda x: np.array([np.atleast_1d(f(row[:3], row[3:])) for row in x], object)


def split(x):
    return x[:, :3], x[:, 3:]


WEIGHTS = torch.randn(3, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SHARES, CLASSES = WEIGHTS.softmax(-1), torch.tensor([0, 2, 5])

# name -> torch's function of [3, 6], and that in mpmath.
ROWS = {
    "logsumexp": (lambda x: x.logsumexp(-1, keepdim=True), rows(log_sum_exp)),
    "logsumexp-both": (
        lambda x: x.logsumexp((0, 1))[None],
        lambda x: np.array([log_sum_exp(x.flatten())], object),
    ),
    "softmax": (lambda x: x.softmax(-1), rows(soft_max)),
    "softmax-first": (lambda x: x.softmax(0), lambda x: rows(soft_max)(x.T).T),
    "softmin": (lambda x: F.softmin(x, -1), lambda x: rows(soft_max)(-x)),
    "log_softmax": (lambda x: x.log_softmax(-1), rows(log_soft_max)),
    "log_softmax-first": (lambda x: x.log_softmax(0), lambda x: rows(log_soft_max)(x.T).T),
    "logcumsumexp": (
        lambda x: x.logcumsumexp(-1),
        rows(lambda row: np.array([log_sum_exp(row[: i + 1]) for i in range(6)], object)),
    ),
    "logaddexp": (
        lambda x: torch.logaddexp(*split(x)),
        halves(each(lambda a, b: log_sum_exp((a, b)))),
    ),
    "logaddexp2": (
        lambda x: torch.logaddexp2(*split(x)),
        halves(each(lambda a, b: mpmath.log(mpf(2) ** a + mpf(2) ** b, 2))),
    ),
    "hypot": (lambda x: torch.hypot(*split(x)), halves(each(mpmath.hypot))),
    "atan2": (lambda x: torch.atan2(*split(x)), halves(each(mpmath.atan2))),
    "cumprod": (lambda x: x.cumprod(-1), rows(running_product)),
    "prod": (lambda x: x.prod(-1, keepdim=True), rows(mpmath.fprod)),
    "prod-all": (lambda x: x.prod()[None], lambda x: np.array([mpmath.fprod(x.flatten())])),
    "var": (lambda x: x.var(-1, keepdim=True), rows(variance)),
    "std": (lambda x: x.std(-1, keepdim=True), rows(lambda row: mpmath.sqrt(variance(row)))),
    "std_mean": (
        lambda x: torch.std_mean(x, -1, unbiased=False)[0][:, None],
        rows(lambda row: mpmath.sqrt(variance(row, 0))),
    ),
    "vector_norm": (lambda x: linalg.vector_norm(x, dim=-1, keepdim=True), rows(length)),
    "vector_norm-3": (
        lambda x: linalg.vector_norm(x, 3, dim=-1, keepdim=True),
        rows(lambda row: length(row, 3)),
    ),
    "norm": (lambda x: x.norm(dim=-1, keepdim=True), rows(length)),
    "normalize": (lambda x: F.normalize(x, dim=-1), rows(lambda row: row / length(row))),
    "cosine_similarity": (
        lambda x: F.cosine_similarity(*split(x), dim=-1)[:, None],
        halves(lambda a, b: sum(a * b) / length(a) / length(b)),
    ),
    "pairwise_distance": (
        lambda x: F.pairwise_distance(*split(x))[:, None],
        halves(lambda a, b: length(a - b + mpf(1e-6))),
    ),
    "cdist": (
        lambda x: torch.cdist(*split(x)),
        lambda x: np.array([[length(a - b) for b in x[:, 3:]] for a in x[:, :3]], object),
    ),
    "cdist-3": (
        lambda x: torch.cdist(*split(x), p=3.0),
        lambda x: np.array([[length(a - b, 3) for b in x[:, 3:]] for a in x[:, :3]], object),
    ),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), rows(standardised)),
    "rms_norm": (
        lambda x: F.rms_norm(x, (6,), eps=1e-6),
        rows(lambda row: row / mpmath.sqrt(average(row**2) + mpf(1e-6))),
    ),
    "group_norm": (lambda x: F.group_norm(x, 1), rows(standardised)),
    "instance_norm": (lambda x: F.instance_norm(x[None])[0], rows(standardised)),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, CLASSES, reduction="none"),
        lambda x: np.array([-log_soft_max(r)[c] for r, c in zip(x, CLASSES, strict=True)], object),
    ),
    "kl_div": (
        lambda x: F.kl_div(x.log_softmax(-1), SHARES.to(x), reduction="none"),
        lambda x: numbers(SHARES) * (each(mpmath.log)(numbers(SHARES)) - rows(log_soft_max)(x)),
    ),
    "binary_cross_entropy_with_logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, SHARES.to(x), reduction="none"),
        lambda x: each(softplus)(x) - numbers(SHARES) * x,
    ),
    "huber_loss": (
        lambda x: F.huber_loss(x, WEIGHTS.to(x), reduction="none"),
        lambda x: each(lambda d: d * d / 2 if abs(d) < 1 else abs(d) - mpf(0.5))(
            x - numbers(WEIGHTS)
        ),
    ),
    "smooth_l1_loss": (
        lambda x: F.smooth_l1_loss(x, WEIGHTS.to(x), reduction="none"),
        lambda x: each(lambda d: d * d / 2 if abs(d) < 1 else abs(d) - mpf(0.5))(
            x - numbers(WEIGHTS)
        ),
    ),
    "soft_margin_loss": (
        lambda x: F.soft_margin_loss(x, WEIGHTS.sign().to(x), reduction="none"),
        lambda x: each(softplus)(-numbers(WEIGHTS.sign()) * x),
    ),
    "glu": (lambda x: F.glu(x, -1), lambda x: x[:, :3] * each(sigmoid)(x[:, 3:])),
    "renorm": (
        lambda x: torch.renorm(x, 2, 0, 1.0),
        rows(lambda row: row if length(row) <= 1 else row / (length(row) + mpf(1e-7))),
    ),
    "det": (lambda x: linalg.det(x[:, :3])[None], matrix(lambda m: mpmath.det(m[:, :3]))),
    "slogdet": (
        lambda x: linalg.slogdet(x[:, :3])[1][None],
        matrix(lambda m: mpmath.log(abs(mpmath.det(m[:, :3])))),
    ),
    "inv": (lambda x: linalg.inv(x[:, :3]), matrix(lambda m: m[:, :3] ** -1)),
    "solve": (
        lambda x: linalg.solve(*split(x)),
        matrix(lambda m: m[:, :3] ** -1 * m[:, 3:]),
    ),
    "cholesky": (lambda x: linalg.cholesky(x @ x.mT), matrix(lambda m: mpmath.cholesky(m * m.T))),
    "cholesky_inverse": (
        lambda x: torch.cholesky_inverse(linalg.cholesky(x @ x.mT)),
        matrix(lambda m: (m * m.T) ** -1),
    ),
    "cholesky_inverse-upper": (
        lambda x: torch.cholesky_inverse(linalg.cholesky(x @ x.mT).mT, upper=True),
        matrix(lambda m: (m * m.T) ** -1),
    ),
    "matrix_exp": (
        lambda x: linalg.matrix_exp(x[:, :3] / 10),
        matrix(lambda m: mpmath.expm(m[:, :3] / 10)),
    ),
    "pinv": (linalg.pinv, matrix(lambda m: m.T * (m * m.T) ** -1)),
}
# Products of matrices and their inverses lose digits by their condition, which grows with these.
WELL_CONDITIONED = (
    "det slogdet inv solve cholesky cholesky_inverse cholesky_inverse-upper matrix_exp pinv"
).split()


def shaped(kind, generator):
    x = random((3, 6), generator)
    if kind == "zeros":
        x[0, 2] = x[1, 1] = x[1, 4] = 0
    elif kind == "equal":
        x[:, 1], x[:, 4] = x[:, 0], x[:, 3]
        x[:, 2] += 0.1
    elif kind == "offset":
        x += 100
    else:
        x *= kind
    return x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, dtype):
    f, exact = ROWS[name]
    generator = torch.Generator().manual_seed(0)
    for kind in ("zeros", "equal", "offset", 1e-3, 1.0, 20.0, 100.0):
        x = shaped(kind, generator).to(dtype)
        if name in WELL_CONDITIONED and kind not in ("zeros", 1.0, 20.0):
            continue
        if name in ("atan2", "hypot") and kind == "zeros":
            x = x + (x == 0)  # their kink is below
        check(f, exact, x)


def leibniz(m):
    """The determinant of [4, 4] as a sum over permutations."""
    total = mpf(0)
    for order in itertools.permutations(range(4)):
        swaps = sum(order[j] > order[i] for i in range(4) for j in range(i))
        total += (-1) ** swaps * mpmath.fprod(m[i, k] for i, k in enumerate(order))
    return np.array([total], object)


def of_rank(rank):
    generator = torch.Generator().manual_seed(rank)
    return random((4, rank), generator).round(decimals=1) @ random((rank, 4), generator).round()


@pytest.mark.parametrize(
    "x",
    [
        *(of_rank(rank) for rank in range(4)),
        torch.diag(torch.tensor([1.0, 2, 0, 3]).double()),
        torch.eye(4).double(),
        random((4, 4), torch.Generator().manual_seed(7)),
    ],
    ids=["rank-0", "rank-1", "rank-2", "rank-3", "diagonal", "identity", "full"],
)
def test_determinants_of_any_rank(x):
    check(lambda x: linalg.det(x)[None], leibniz, x)
    check(lambda x: torch.stack((x, 2 * x)).det()[1:] / 16, leibniz, x)


# -- kinks: equal, zero and infinite entries, where the derivative is a convention

KINKS = {
    "std": lambda x: x.std(-1),
    "std-first": lambda x: x.std(0, unbiased=False),
    "std-all": lambda x: x.std()[None],
    "std_mean": lambda x: torch.std_mean(x, -1)[0],
    "var": lambda x: x.var(-1),
    "vector_norm": lambda x: linalg.vector_norm(x, dim=-1),
    "vector_norm-1": lambda x: linalg.vector_norm(x, 1, dim=-1),
    "vector_norm-inf": lambda x: linalg.vector_norm(x, INF, dim=-1),
    "norm": lambda x: x.norm(dim=-1),
    "norm-all": lambda x: x.norm()[None],
    "matrix_norm": lambda x: linalg.matrix_norm(x)[None],
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), dim=-1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(0), eps=0.0),
    "dist": lambda x: torch.dist(x[0], x[1])[None],
    "cdist": lambda x: torch.cdist(x, x.flip(0)),
    "cdist-1": lambda x: torch.cdist(x, x, p=1.0),
    "cdist-inf": lambda x: torch.cdist(x, x, p=INF),
    "pdist": lambda x: F.pdist(x),
    "prod": lambda x: x.prod(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "max": lambda x: x.max(-1)[0],
    "max-all": lambda x: x.max()[None],
    "amax": lambda x: x.amax(-1),
    "median": lambda x: x.median(-1)[0],
    "median-all": lambda x: x.median()[None],
    "mode": lambda x: x.mode(-1)[0],
    "kthvalue": lambda x: x.kthvalue(2, -1)[0],
    "quantile": lambda x: x.quantile(0.3, -1),
    "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: x.topk(3, -1)[0],
    "maximum": lambda x: torch.maximum(x, x.flip(-1)),
    "cummax": lambda x: x.cummax(-1)[0],
    "cummin": lambda x: x.cummin(-1)[0],
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "softshrink": lambda x: F.softshrink(x, 1.0),
    "hardshrink": lambda x: F.hardshrink(x, 1.0),
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp-tensor": lambda x: x.clamp(torch.zeros_like(x), torch.ones_like(x)),
    "pow-0": lambda x: x**0,
    "pow-1": lambda x: x**1,
    "pow-2": lambda x: x**2,
    "pow-3": lambda x: x**3,
    "pow-tensor": lambda x: torch.pow(x, torch.tensor([0.0, 1, 2, 3, 2]).to(x)),
    "rsqrt": lambda x: (x * x + 1e-6).rsqrt(),
    "xlogy": lambda x: torch.xlogy(x, torch.tensor(2.0).to(x)),
    "atan2": lambda x: torch.atan2(x, x.flip(-1)),
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(-1)),
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "rms_norm": lambda x: F.rms_norm(x, (5,)),
    "group_norm": lambda x: F.group_norm(x[:, :, None].expand(-1, -1, 2), 5),
    "instance_norm": lambda x: F.instance_norm(x[None]),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(
        x, x.flip(0), x.roll(1, 0), reduction="none"
    ),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(
        x.clamp(0, 1), torch.full_like(x, 0.5), reduction="none"
    ),
    "kl_div": lambda x: F.kl_div(x, torch.zeros_like(x), reduction="none"),
    "kl_div-target": lambda x: F.kl_div(
        x, torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0]).to(x), reduction="none"
    ),
    "mish": F.mish,
    "softplus": F.softplus,
    "max_pool1d": lambda x: F.max_pool1d(x[None], 2)[0],
    "lp_pool1d": lambda x: F.lp_pool1d(x[None], 2.0, 2)[0],
    "fmod": lambda x: x.fmod(1.0),
    "sinc": torch.sinc,
    "cov": torch.cov,
}
INPUTS = {
    "zeros": torch.zeros(3, 5),
    "ones": torch.ones(3, 5),
    "ties": torch.tensor([[1.0, 1, 0, -1, 0], [0, 0, 0, 0, 0], [2, 2, 2, 2, 2]]),
    "large": torch.tensor(
        [[100.0, -100, 1e4, -1e4, 0], [1e6, 1e6, -1e6, 0, 1], [30, 30, 30, -30, -30]]
    ),
}


def eager_jacobian(f, x):
    x = x.clone().requires_grad_()
    y = f(x)
    slopes = [torch.autograd.grad(each, x, retain_graph=True)[0] for each in y.flatten()]
    return y.detach(), torch.stack(slopes).flatten(1)


# The constants of these in torch's kernels are fp32 numbers.
ROUNDED = {"hardsigmoid": 1e-7, "binary_cross_entropy": 1e-7}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", KINKS)
def test_kinks_have_the_gradient_of_eager(name, kind):
    f, x = KINKS[name], INPUTS[kind].double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y, jacobian = eager_jacobian(f, x)
    assert jacobian.isfinite().all()
    generator = torch.Generator().manual_seed(0)
    v, y_bar, y_dot_bar = (random(s, generator) for s in (x.shape, y.shape, y.shape))
    got = dual(f, x, v, y_bar, y_dot_bar)
    close = {"rtol": ROUNDED.get(name, 1e-9), "atol": 1e-12}
    torch.testing.assert_close(got[0], y, **close)
    torch.testing.assert_close(got[1], (jacobian @ v.flatten()).view(y.shape), **close)
    torch.testing.assert_close(got[3].flatten(), jacobian.T @ y_dot_bar.flatten(), **close)
    assert got[2].isfinite().all()


@pytest.mark.parametrize("name", ["logcumsumexp", "logsumexp", "softmax", "log_softmax", "cummax"])
def test_entries_of_minus_infinity(name):
    """As masked logits have them: the values and derivatives of the others are as if they were not
    there."""
    x = torch.tensor([[-INF, 0.5, -INF, 1.0, 2.0], [0.1, -INF, 3.0, -INF, -INF]]).double()
    low = x.clamp_min(-1e4)
    f = {"cummax": lambda x: x.cummax(-1)[0]}.get(name, lambda x: getattr(x, name)(-1))
    generator = torch.Generator().manual_seed(0)
    v = random(x.shape, generator)
    y = f(x)
    y_bar, y_dot_bar = (random(y.shape, generator) * y.isfinite() for _ in range(2))
    got = dual(f, x, v, y_bar, y_dot_bar)
    expected = dual(f, low, v, y_bar, y_dot_bar)
    torch.testing.assert_close(got[0], y)
    for mine, theirs in zip(got[1:], expected[1:], strict=True):
        assert mine.isfinite().all()
        seen = y.isfinite() if mine is got[1] else torch.ones_like(mine, dtype=torch.bool)
        torch.testing.assert_close(mine[seen], theirs[seen])


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("shape", [(5, 4), (1, 3), (2, 0), (0, 2)], ids=str)
def test_logcumsumexp_over_any_dimension(shape, dim):
    x = random((2, *shape), torch.Generator().manual_seed(0)).requires_grad_()
    out = Dual(x).logcumsumexp(dim=dim).stack
    expected = torch.func.jvp(lambda z: torch.cumsum(z.exp(), dim).log(), (x[0],), (x[1],))
    torch.testing.assert_close(out, torch.stack(expected))
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_a_scan_in_log_space():
    """The minGRU of Feng et al. (2024): h_t = (1 - z_t) h_(t-1) + z_t g_t by logcumsumexp."""

    def by_logs(z, g):
        decay = -F.softplus(z).cumsum(0)
        return (decay + torch.logcumsumexp(F.logsigmoid(z) + g.log() - decay, 0)).exp()

    def by_steps(z, g):
        h, states = torch.zeros_like(z[0]), []
        for gate, value in zip(z, g, strict=True):
            h = torch.sigmoid(-gate) * h + torch.sigmoid(gate) * value
            states.append(h)
        return torch.stack(states)

    generator = torch.Generator().manual_seed(0)
    z, v = (30 * random(24, generator), random(24, generator))
    g = random(24, generator).exp()
    bars = random(24, generator), random(24, generator)
    got = dual(lambda z: by_logs(z, g), z, v, *bars)
    expected = dual(lambda z: by_steps(z, g), z, v, *bars)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-10 * theirs.norm()
