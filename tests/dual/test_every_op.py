"""Every differentiable op that torch describes, on Duals: value and tangent against torch.func.jvp,
the gradient against a finite difference (which knows nothing of torch's formulas), or an error.

What must not happen is a wrong number: an op either agrees or raises.
"""

from itertools import islice

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from stars_fast.dual import Dual
from stars_fast.dual.patches import surroundings

SAMPLES = 3  # per op, of the first TRIED that are small and have a derivative in torch
TRIED = 20
LARGEST = 500  # elements of an input

LEFT_OUT = {
    "bfloat16": "a finite difference sees the rounding",
    "half": "a finite difference sees the rounding",
    "float": "a finite difference sees the rounding",
    "normal": "torch gives its draw no derivative",
    "nn.functional.embedding": "drops gradients of the padding row by design",
    "nn.functional.max_unpool1d": "samples repeat indices: the result is no function",
    "nn.functional.max_unpool2d": "samples repeat indices: the result is no function",
    "nn.functional.max_unpool3d": "samples repeat indices: the result is no function",
    "linalg.cholesky": "the finite difference leaves the symmetric matrices",
    "linalg.cholesky_ex": "the finite difference leaves the symmetric matrices",
    "linalg.eigh": "the finite difference leaves the symmetric matrices",
    "linalg.eigvalsh": "the finite difference leaves the symmetric matrices",
    "linalg.matrix_sqrth": "the finite difference leaves the symmetric matrices",
    "linalg.pinv": "the finite difference leaves the symmetric matrices",
    "linalg.norm": "samples sit at the kink of the norm",
    "special.entr": "samples lie outside the domain",
    "var": "torch gives 0 for the tangent of a NaN over no elements",
    "var_mean": "torch gives 0 for the tangent of a NaN over no elements",
    "std": "torch gives 0 for the tangent of a NaN over no elements",
    "std_mean": "torch gives 0 for the tangent of a NaN over no elements",
}
# Compared with differences of the value instead of torch's tangent.
TORCH_IS_WRONG = {
    "logcumsumexp": "its tangent is off at spread inputs",
    "scatter_reduce prod": "it has no tangent, and torch.func.jvp says 0",
}
REFUSED = """
lu_unpack as_strided as_strided-partial_views as_strided_copy as_strided_scatter native_layer_norm
native_batch_norm triangular_solve linalg.lstsq linalg.lstsq-grad_oriented linalg.lu
""".split()
# Complex results, no forward derivative in torch, large samples.
UNJUDGED = """
cdist cholesky view_as_complex complex nn.functional.multi_margin_loss
nn.functional.multilabel_margin_loss to ormqr slice_scatter polar index_reduce-mean
index_reduce-prod index_reduce-amin index_reduce-amax cdouble cfloat chalf native_dropout_backward
nn.functional.dropout3d nn.functional.feature_alpha_dropout-with_train nn.functional.embedding_bag
nn.functional.grid_sample grid_sampler_2d grid_sampler_3d nn.functional.ctc_loss
nn.functional.pdist fft.fft fft.fft2 fft.fftn fft.rfft fft.rfft2 fft.rfftn fft.ifft fft.ifft2
fft.ifftn fft.ihfft fft.ihfft2 fft.ihfftn linalg.eig linalg.eigvals
""".split()
FAMILIES_LEFT_OUT = ("_", "masked.", "sparse", "to_sparse", "torch.ops", "jiterator")


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def floats(tree):
    return [leaf for leaf in tree_flatten(tree)[0] if is_float(leaf)]


def seeded(run, inputs):
    torch.manual_seed(1)
    with surroundings():
        return run(inputs)


def differences(run, primals, tangents):
    """Derivatives of the results in the direction of the tangents."""
    step = 1e-6
    up = run([p + step * t for p, t in zip(primals, tangents, strict=True)])
    down = run([p - step * t for p, t in zip(primals, tangents, strict=True)])
    return [(a - b) / (2 * step) for a, b in zip(up, down, strict=True)]


def check_sample(op, sample):
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_float(leaf)][: len(floats(sample.input))]
    if not places or sum(leaves[i].numel() for i in places) > LARGEST:
        return None

    def run(inputs):
        filled = list(leaves)
        for place, value in zip(places, inputs, strict=True):
            filled[place] = value
        first, args, kwargs = tree_unflatten(filled, spec)
        return floats(op.op(first, *args, **kwargs))

    primals = tuple(leaves[i].detach().clone() for i in places)
    tangents = tuple(torch.randn_like(p) for p in primals)
    try:
        torch.manual_seed(1)
        values, derivatives = torch.func.jvp(lambda *p: tuple(run(p)), primals, tangents)
    except (RuntimeError, NotImplementedError):
        return None  # torch itself has no derivative for this sample
    close = {"equal_nan": True}
    if f"{op.name} {op.variant_test_name}".strip() in TORCH_IS_WRONG:
        derivatives = differences(run, primals, tangents)
        close.update(rtol=1e-6, atol=1e-6)
    stacks = [torch.stack(pair).requires_grad_() for pair in zip(primals, tangents, strict=True)]
    try:
        outputs = seeded(run, [Dual(stack) for stack in stacks])
        duals = [out for out in outputs if type(out) is Dual]
        bars = [torch.randn_like(out.stack) for out in duals]
        loss = sum((out.stack * bar).sum() for out, bar in zip(duals, bars, strict=True))
        grads = torch.autograd.grad(loss, stacks, allow_unused=True) if duals else []
    except RuntimeError as error:
        if "stars_fast" not in str(error):
            raise AssertionError(f"unclear error: {error}") from error
        return "refused"

    for out, value, derivative in zip(outputs, values, derivatives, strict=True):
        assert out.shape == value.shape
        if type(out) is Dual:
            torch.testing.assert_close(out.stack[0], value, equal_nan=True)
            torch.testing.assert_close(out.stack[1], derivative, **close)
        else:
            torch.testing.assert_close(out, value, equal_nan=True)
            assert not derivative.any(), "a tangent went missing"

    def scalar(inputs):
        with torch.no_grad():
            moved = [out for out in seeded(run, [Dual(x) for x in inputs]) if type(out) is Dual]
            return sum((out.stack * bar).sum() for out, bar in zip(moved, bars, strict=True))

    if duals:
        steps = [torch.randn_like(stack) for stack in stacks]
        numeric = scalar([s.detach() + 1e-6 * d for s, d in zip(stacks, steps, strict=True)])
        numeric -= scalar([s.detach() - 1e-6 * d for s, d in zip(stacks, steps, strict=True)])
        analytic = sum((g * d).sum() for g, d in zip(grads, steps, strict=True) if g is not None)
        # Central differences with a step of 1e-6 in fp64 keep about six digits.
        torch.testing.assert_close(
            torch.as_tensor(analytic, dtype=torch.float64), numeric / 2e-6, rtol=1e-4, atol=1e-4
        )
    return "agreed"


OPS = {
    f"{op.name} {op.variant_test_name}".strip().replace(" ", "-"): op
    for op in op_db
    if torch.float64 in op.dtypes
    and op.supports_autograd
    and op.name not in LEFT_OUT
    and not op.name.startswith(FAMILIES_LEFT_OUT)
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_op_agrees_or_refuses(name):
    torch.manual_seed(0)
    samples = islice(OPS[name].sample_inputs("cpu", torch.float64), TRIED)
    outcomes = (check_sample(OPS[name], sample) for sample in samples)
    outcomes = set(islice(filter(None, outcomes), SAMPLES))
    assert "agreed" in outcomes or name in (REFUSED if outcomes else UNJUDGED)
