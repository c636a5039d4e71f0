"""The ops as models call them: tensors give tensors, pairs give pairs, and mixed they agree."""

import pytest
import torch
import torch.nn.functional as F
from oracle import cotangents, dual_of, randn, relative_error
from tolerances import OPS
from torch import nn

from stars_fast import Dual, functional
from stars_fast.dual.registry import observe
from stars_fast.models.plain_linear import gated_mlp, project, project_merged
from stars_fast.ops import reference
from stars_fast.ops.spans import Spans

D = 8
COS, SIN = randn(1, 5, D, seed=3), randn(1, 5, D, seed=4)
MASK = torch.tensor([[1, 1, 0, 1, 0]] * 5).bool() | torch.eye(5).bool()


def sandwich(branch, residual, out, into, eps_out, eps_in):
    h = residual + reference.rms_norm(branch, out, eps_out)
    return h, reference.rms_norm(h, into, eps_in)


def spanned(q, k, v):
    return reference.attention(q, k, v, causal=True)


HEADS = (2, 4, 5, D)
KEYS = (2, 2, 5, D)
SPANS = Spans.of_mask(torch.ones(1, 1, 5, 5).tril().bool())
# Carriers, weights, what else is given -> the op, its plain form.
CASES = {
    "rms_norm": ([(3, D)], [(D,)], (1e-6,), functional.rms_norm, reference.rms_norm),
    "layer_norm": ([(3, D)], [(D,), (D,)], (1e-5,), functional.layer_norm, reference.layer_norm),
    "sandwich": ([(3, D), (3, D)], [(D,), (D,)], (1e-6, 1e-5), functional.sandwich, sandwich),
    "add": ([(3, D), (3, D)], [], (), functional.add, torch.add),
    "linear": ([(3, D)], [(4, D)], (), functional.linear, F.linear),
    "linear, bias": ([(3, D)], [(4, D), (4,)], (), functional.linear, F.linear),
    "linear_heads": (
        [(2, 5, D)], [(2 * D, D), (2 * D,)], (D,), functional.linear_heads,
        lambda x, w, b, width: F.linear(x, w, b).unflatten(-1, (2, width)).transpose(1, 2),
    ),
    "linear_heads, turned": (
        [(2, 5, D)], [(2 * D, D), (2 * D,)], (D, (COS, SIN)), functional.linear_heads,
        lambda x, w, b, width, tables: reference.rotary(
            F.linear(x, w, b).unflatten(-1, (2, width)).transpose(1, 2), *tables
        ),
    ),
    "linear_of_heads": (
        [HEADS], [(3, 4 * D), (3,)], (), functional.linear_of_heads,
        lambda x, w, b: F.linear(x.transpose(1, 2).reshape(2, 5, 4 * D), w, b),
    ),
    "gated_mlp": (
        [(3, D)], [(6, D), (6, D), (4, 6)], ("silu",), functional.gated_mlp,
        lambda x, g, u, d, name: F.linear(
            reference.gated(F.linear(x, g), F.linear(x, u), name), d
        ),
    ),
    "gated": ([(3, D), (3, D)], [], ("silu",), functional.gated, reference.gated),
    "pointwise": ([(3, D)], [], ("gelu",), functional.pointwise, reference.pointwise),
    "softmax": ([(3, D)], [], (), functional.softmax, reference.softmax),
    "split_heads": (
        [(2, 5, 2 * D)], [], (D,), functional.split_heads,
        lambda x, width: x.unflatten(-1, (2, width)).transpose(1, 2),
    ),
    "merge_heads": (
        [HEADS], [], (), functional.merge_heads, lambda x: x.transpose(1, 2).reshape(2, 5, 4 * D)
    ),
    "rotary": (
        [HEADS], [], (COS, SIN), functional.rotary, reference.rotary
    ),
    "attention": ([HEADS, KEYS, KEYS], [], (), functional.attention, reference.attention),
    "attention, causal": (
        [HEADS, KEYS, KEYS], [], (None, True), functional.attention, reference.attention
    ),
    "attention, mask": (
        [HEADS, KEYS, KEYS], [], (MASK,), functional.attention, reference.attention
    ),
    "attention, mask and causal": (
        [HEADS, KEYS, KEYS], [], (MASK, True), functional.attention, reference.attention
    ),
    "attention, spans": (
        [HEADS, KEYS, KEYS], [], (),
        lambda q, k, v: functional.attention(q, k, v, spans=SPANS), spanned,
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request):
    shapes, weights, rest, op, plain = CASES[request.param]
    carriers = [randn(2, *shape, seed=i) for i, shape in enumerate(shapes)]
    weights = [randn(*shape, seed=10 + i).requires_grad_() for i, shape in enumerate(weights)]
    return op, plain, carriers, [*weights, *rest]


def outputs(found):
    return found if isinstance(found, tuple) else (found,)


def test_tensors_give_tensors(case):
    op, plain, carriers, rest = case
    primals = [stack[0].clone().requires_grad_() for stack in carriers]
    for got, want in zip(
        outputs(op(*primals, *rest)), outputs(plain(*primals, *rest)), strict=True
    ):
        assert type(got) is torch.Tensor
        assert relative_error(got, want) < OPS[torch.float64]
        bar = randn(*want.shape, seed=5)
        grads = [torch.autograd.grad(y, primals, bar, retain_graph=True) for y in (got, want)]
        for one, other in zip(*grads, strict=True):
            assert relative_error(one, other) < OPS[torch.float64]


@pytest.mark.parametrize("plain_from", [None, 1, 2], ids=["all pairs", "last plain", "two plain"])
def test_pairs_give_pairs_with_every_cotangent(case, plain_from):
    """Also where some of the tensors are plain, whose tangent is zero."""
    op, plain, carriers, rest = case
    kept = len(carriers) if plain_from is None else len(carriers) - plain_from
    if kept < 1:
        pytest.skip("no pair would be left")
    leaves = [stack.clone().requires_grad_() for stack in carriers]
    for i in range(kept, len(leaves)):
        leaves[i] = leaves[i][0].detach().requires_grad_()
    given = [Dual(x) if i < kept else x for i, x in enumerate(leaves)]
    stacks = [
        x if i < kept else torch.stack((x, torch.zeros_like(x))) for i, x in enumerate(leaves)
    ]
    weights = [x for x in rest if isinstance(x, torch.Tensor) and x.requires_grad]
    got, want = outputs(op(*given, *rest)), outputs(dual_of(plain, stacks, rest))
    for y, y_want in zip(got, want, strict=True):
        assert type(y) is Dual
        for half in range(2):
            assert relative_error(y.stack[half], y_want[half]) < OPS[torch.float64]
        for bar in cotangents(y_want.shape):
            inputs = [*leaves, *weights]
            options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            found = torch.autograd.grad(y.stack, inputs, bar, **options)
            expected = torch.autograd.grad(y_want, inputs, bar, **options)
            for x_bar, x_bar_want in zip(found, expected, strict=True):
                assert relative_error(x_bar, x_bar_want) < 10 * OPS[torch.float64]


def test_each_op_is_reported_once_and_of_pairs_alone(case):
    op, _, carriers, rest = case
    seen = []
    stop = observe(lambda name, kind: seen.append((name, kind)))
    try:
        op(*(stack[0] for stack in carriers), *rest)
        assert seen == []
        op(*map(Dual, carriers), *rest)
    finally:
        stop()
    assert [kind for _, kind in seen] in (["fused"], ["stacked"], ["stacked", "fused"])
    assert all(hasattr(functional, name) for name, _ in seen)


@pytest.mark.parametrize("kind", ["plain", "bias", "hooked", "adapted"])
def test_a_projection_of_a_pair_is_its_module_s(kind):
    module = nn.Linear(D, 4, bias=kind == "bias").double()
    calls = []
    if kind == "hooked":
        module.register_forward_hook(lambda module, args, out: calls.append(1) or 2 * out)
    if kind == "adapted":
        module = nn.Sequential(module, nn.Tanh())
    stack = randn(2, 3, D)
    got = project(module, Dual(stack))
    want = dual_of(module, [stack])
    assert relative_error(got.stack, want) < OPS[torch.float64]
    assert (len(calls) > 0) == (kind == "hooked")


def test_arguments_that_do_not_fit_are_named():
    x = randn(2, 3, D)
    with pytest.raises(ValueError, match="weight"):
        functional.rms_norm(Dual(x), randn(D + 1), 1e-6)
    q = randn(1, 2, 5, D)
    with pytest.raises(ValueError, match=r"spans: expected None"):
        functional.attention(q, q, q, causal=True, spans=SPANS)
    with pytest.raises(TypeError, match="floating point"):
        functional.rms_norm(torch.ones(3, D, dtype=torch.int64), None, 1e-6)


def test_carriers_may_come_by_name():
    x, w = randn(2, 3, D), randn(D, seed=1)
    want = functional.rms_norm(Dual(x), w, 1e-6)
    got = functional.rms_norm(eps=1e-6, weight=w, x=Dual(x))
    assert torch.equal(got.stack, want.stack)
    got = functional.gated(Dual(x), u=Dual(x), activation="silu")
    assert torch.equal(got.stack, functional.gated(Dual(x), Dual(x)).stack)
    plain = functional.gated(u=x, g=x)
    assert torch.equal(plain, functional.gated(x, x))


@pytest.mark.parametrize("through", [functional.linear, functional.linear_heads])
@pytest.mark.parametrize("where", ["x and weight", "weight", "bias", "bias by name"])
def test_a_weight_with_a_tangent_goes_by_torch_s_rules(through, where):
    """As in a hypernetwork, whose weights are made from the state."""
    x, w, b = randn(2, 2, 3, D), randn(2, 4, D, seed=1), randn(2, 4, seed=2)
    given = [
        Dual(each) if name in where else each[0]
        for name, each in (("x", x), ("weight", w), ("bias", b))
    ]
    stacks = [
        each if name in where else torch.stack((each[0], torch.zeros_like(each[0])))
        for name, each in (("x", x), ("weight", w), ("bias", b))
    ]
    width = (4,) if through is functional.linear_heads else ()
    if where == "bias by name":
        options = {"width": 4} if width else {}
        got = through(given[0], given[1], bias=given[2], **options)
    else:
        got = through(*given, *width)
    want = dual_of(lambda *each: through(*each, *width), stacks)
    assert relative_error(got.stack, want) < OPS[torch.float64]


def test_other_maps_of_pairs_take_a_weight_with_a_tangent_too():
    x, g, u, d = (
        randn(2, *size, seed=i) for i, size in enumerate([(3, D), (6, D), (6, D), (4, 6)])
    )
    got = functional.gated_mlp(Dual(x), Dual(g), Dual(u), Dual(d))
    want = dual_of(lambda x, g, u, d: F.linear(F.silu(x @ g.mT) * (x @ u.mT), d), [x, g, u, d])
    assert relative_error(got.stack, want) < OPS[torch.float64]
    q, o = randn(2, *HEADS), randn(2, 3, 4 * D)
    got = functional.linear_of_heads(Dual(q), Dual(o))
    assert (
        relative_error(got.stack, dual_of(functional.linear_of_heads, [q, o])) < OPS[torch.float64]
    )
    x, w = randn(2, 2, 5, D), randn(2, 2 * D, D)
    got = functional.linear_heads(Dual(x), Dual(w), None, D, (COS, SIN))
    want = dual_of(
        lambda x, w: reference.rotary(functional.linear_heads(x, w, None, D), COS, SIN), [x, w]
    )
    assert relative_error(got.stack, want) < OPS[torch.float64]


@pytest.mark.parametrize("kind", ["plain", "bias", "hooked"])
def test_a_gated_mlp_and_merged_heads_are_those_of_the_modules(kind):
    maps = [nn.Linear(D, 6), nn.Linear(D, 6), nn.Linear(6, D)]
    gate, up, down = (each.double() for each in maps)
    if kind != "bias":
        gate.bias = up.bias = down.bias = None
    if kind == "hooked":
        up.register_forward_hook(lambda module, args, out: 2 * out)
    x = randn(2, 3, D)
    got = gated_mlp(gate, up, down, Dual(x), "silu")
    want = dual_of(lambda x: down(F.silu(gate(x)) * up(x)), [x])
    assert relative_error(got.stack, want) < OPS[torch.float64]
    assert relative_error(gated_mlp(gate, up, down, x[0], "silu"), want[0]) < OPS[torch.float64]
    merged = nn.Linear(4 * D, 3, bias=kind == "bias").double()
    q = randn(2, *HEADS)
    want = dual_of(lambda q: merged(q.transpose(1, 2).flatten(-2)), [q])
    assert relative_error(project_merged(merged, Dual(q)).stack, want) < OPS[torch.float64]
    assert relative_error(project_merged(merged, q[0]), want[0]) < OPS[torch.float64]


def test_a_pair_where_no_tangent_is_carried_is_named():
    x, w = randn(2, 3, D), randn(2, D, seed=1)
    with pytest.raises(TypeError, match="rms_norm: weight: expected a plain Tensor, got a Dual"):
        functional.rms_norm(Dual(x), Dual(w), 1e-6)
    with pytest.raises(TypeError, match="rms_norm: weight: expected a plain Tensor, got a Dual"):
        functional.rms_norm(x[0], weight=Dual(w), eps=1e-6)
    with pytest.raises(TypeError, match="gated: u: expected a Tensor or a Dual, got list"):
        functional.gated(Dual(x), [1.0])
    with pytest.raises(TypeError, match="sandwich: weight_in: expected a plain Tensor, got a Dual"):
        functional.sandwich(x[0], x[0], None, Dual(w), 1e-6, 1e-6)
    with pytest.raises(TypeError, match="gated: expected g, u"):
        functional.gated(Dual(x))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tangent", [False, True])
def test_a_learned_mask_has_its_gradient(causal, tangent):
    q, k, v = (randn(2, *shape, seed=i) for i, shape in enumerate([HEADS, KEYS, KEYS]))
    bias = randn(2, 1, 4, 5, 5, seed=9)
    if not tangent:
        bias[1] = 0
    bias.requires_grad_()
    given = Dual(bias) if tangent else bias[0]
    got = functional.attention(Dual(q), Dual(k), Dual(v), given, causal).stack
    want = dual_of(lambda *x: reference.attention(*x, causal), [q, k, v, bias])
    assert relative_error(got, want) < OPS[torch.float64]
    for bar in cotangents(want.shape):
        found, expected = (
            torch.autograd.grad(y, bias, bar, retain_graph=True)[0] for y in (got, want)
        )
        assert relative_error(found[0], expected[0]) < 10 * OPS[torch.float64]
    if not tangent:  # in the eager block too
        torch.testing.assert_close(functional.attention(q[0], k[0], v[0], given, causal), want[0])


def test_attention_under_autocast_is_in_its_dtype():
    q = torch.randn(2, 2, 4, 5, D)
    with torch.autocast("cpu", torch.bfloat16):
        plain = functional.attention(q[0], q[0], q[0])
        pair = functional.attention(Dual(q), Dual(q), Dual(q))
        half = functional.attention(Dual(q.bfloat16()), Dual(q.bfloat16()), Dual(q))
    assert plain.dtype == pair.dtype == half.dtype == torch.bfloat16
    torch.testing.assert_close(pair.stack[0], plain, rtol=1e-2, atol=1e-2)


def test_a_sum_of_other_shapes_is_refused_in_pairs_and_in_tensors():
    """In a pair a smaller shape would meet the axis of primal and tangent."""
    x, y = randn(2, 3, 2, 4), randn(2, 4)
    for given in ((x[0], y), (Dual(x), y), (Dual(x), Dual(y))):
        with pytest.raises(ValueError, match=r"add: y: expected x's shape \[3, 2, 4\], got"):
            functional.add(*given)


@pytest.mark.parametrize("shape", [(0, 5, D), (2, 0, D)])
def test_heads_of_nothing(shape):
    x, w = torch.zeros(2, *shape), torch.zeros(2 * D, D)
    for heads in (functional.split_heads, lambda x, width: functional.linear_heads(x, w, None, D)):
        assert heads(x[0], D).shape == heads(Dual(x), D).shape
        assert heads(x[0], D).shape[-1] == D


LINEAR = ("add", "linear", "split_heads", "merge_heads", "gated_mlp")
SMOOTH = [name for name in CASES if not name.startswith(LINEAR)]


@pytest.mark.parametrize("name", [name for name in SMOOTH if "attention" not in name])
def test_a_second_derivative_is_refused_by_name(name):
    """torch's `once_differentiable` would leave it out in silence where v wants no gradient."""
    shapes, weights, rest, op, _ = CASES[name]
    x = [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    weights = [randn(*shape, seed=10 + i).requires_grad_() for i, shape in enumerate(weights)]
    y = outputs(op(*x, *weights, *rest))[0]
    with pytest.raises(RuntimeError, match="expected a first derivative, got create_graph=True"):
        torch.autograd.grad(y, x[0], randn(*y.shape), create_graph=True)
    pair = outputs(op(*(Dual(torch.stack((each, each))) for each in x), *weights, *rest))[0].stack
    with pytest.raises(RuntimeError, match="expected a first derivative, got create_graph=True"):
        torch.autograd.grad(pair, x[0], randn(*pair.shape), create_graph=True)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("attention")])
def test_a_second_derivative_of_attention_of_pairs_is_refused(name):
    shapes, _, rest, op, _ = CASES[name]
    x = [randn(2, *shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    y = op(*map(Dual, x), *rest).stack
    with pytest.raises(RuntimeError, match="attention: expected a first derivative"):
        torch.autograd.grad(y, x[0], randn(*y.shape), create_graph=True)
