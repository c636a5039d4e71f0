"""Results lie in memory as eager's: by strides `view` accepts or refuses, and `reshape` copies."""

import functools
import gc
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from fuzz.ops import OPS
from fuzz.programs import TOOLS, WIDEST, Draw, with_order
from oracle import randn as numbers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function

from stars_fast import fused_jvp
from stars_fast.dual import layout

pytestmark = pytest.mark.filterwarnings("ignore")  # of ops in beta


def permuted(shape, order):
    """Numbers of a shape whose dimensions lie in this order in memory, slowest first."""
    return with_order(numbers(*shape), order)


def orders(shape):
    return itertools.permutations(range(len(shape)))


def expanded(shape, order, dim):
    x = permuted(shape, order)
    return x.narrow(dim, 0, 1).expand(shape)


def strides(x):
    """Of what has more than one entry: those of the others say nothing."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def tensors(result):
    return [
        x
        for x in (result if isinstance(result, (tuple, list)) else [result])
        if isinstance(x, torch.Tensor)
    ]


def both(op, h):
    """The results of eager and of a pass, as (shape, strides); None where eager refuses."""

    def seen(h):
        return [(tuple(x.shape), strides(x)) for x in tensors(op(h))]

    def block(h):
        found.extend(seen(h))
        return h * 1.0

    found = []
    try:
        right = seen(h)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    fused_jvp(block, h, torch.randn(h.shape, dtype=h.dtype))
    return right, found


def check(op, h):
    right, found = both(op, h)
    assert found == right


# Where eager views an expanded h and the pass can't, it copies, and refuses writes to either.
COPIED = {"view", "view of a size", "reshape", "reshape by name", "reshape to a list"}
COPIED |= {"flatten dims", "flatten last", "swap and join"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["permuted", "expanded"])
def test_every_op_lies_as_eager(kind):
    W, b, c = numbers(WIDEST, WIDEST), numbers(WIDEST), numbers(WIDEST)
    wrong, tried = {}, 0
    for op in OPS:
        if op.in_place or op.dtype == "complex" or (kind == "expanded" and op.name in COPIED):
            continue
        rng = random.Random(op.name)
        for shape in [(2, 3, 4), (2, 3, 4, 4)] if kind == "permuted" else [(2, 3, 4)]:
            for order, dim in itertools.product(orders(shape), range(len(shape))):
                if kind == "permuted" and dim:
                    continue
                h = permuted(shape, order) if kind == "permuted" else expanded(shape, order, dim)
                try:
                    text = Draw(rng, {"h": h}, "h").fill(op.text)
                except IndexError:
                    continue
                names = TOOLS | {"W": W, "b": b, "c": c, "held": lambda x: x}
                found = both(lambda h, text=text, names=names: eval(text, names | {"h": h}), h)
                if found is None:
                    continue
                tried += 1
                if found[0] != found[1]:
                    wrong.setdefault(op.name, (text, shape, order, dim, *found))
    assert not wrong
    assert tried > 5000


MASKS = {
    "none": lambda n: {},
    "causal": lambda n: {"is_causal": True},
    "bool": lambda n: {"attn_mask": torch.ones(n, n, dtype=torch.bool).tril()},
    "bias": lambda n: {"attn_mask": numbers(n, n)},
    "trained": lambda n: {"attn_mask": numbers(n, n).requires_grad_()},
    "of rank 3": lambda n: {"attn_mask": numbers(1, n, n)},
    "dropout": lambda n: {"dropout_p": 1e-9},
}


@pytest.mark.parametrize("grad", [False, True], ids=["constant h", "trained h"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (3, 4, 8)], ids=str)
def test_attention_lies_as_eager(shape, mask, grad):
    if len(shape) == 3 and mask == "of rank 3":
        shape = (1, *shape[1:])
    options = MASKS[mask](shape[-2])

    def attend(*inputs):
        return F.scaled_dot_product_attention(*inputs, **options)

    for order in orders(shape):
        h = permuted(shape, order).requires_grad_(grad)
        check(lambda h: attend(h, h, h), h)
    plain = h.detach().contiguous()
    check(lambda h: attend(h, plain, plain), h)
    check(lambda h: attend(plain, h, plain), h)
    check(lambda h: attend(plain, plain, h), h)


@pytest.mark.parametrize(
    ("query", "key", "value", "options"),
    [
        ((2, 3, 4, 8), (2, 1, 4, 8), (2, 1, 4, 8), {}),
        ((2, 1, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8), {}),
        ((2, 3, 4, 8), (2, 3, 4, 8), (1, 1, 4, 8), {}),
        ((2, 4, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8), {"enable_gqa": True}),
        ((2, 3, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8), {}),
        ((1, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8), {}),
        ((2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8), {}),
        ((2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 5), {}),
        ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8), {}),
        ((1, 2, 3, 4, 8), (1, 2, 3, 4, 8), (1, 2, 3, 4, 8), {}),
    ],
    ids=[
        "one head",
        "one head asks",
        "one value",
        "groups",
        "one key",
        "one query",
        "long",
        "wide",
        "no keys",
        "rank 5",
    ],
)
def test_attention_of_other_sizes_lies_as_eager(query, key, value, options):
    swapped = [
        (*range(len(s) - 3), len(s) - 2, len(s) - 3, len(s) - 1) for s in (query, key, value)
    ]
    q, k, v = map(permuted, (query, key, value), swapped)

    def attend(h):
        return F.scaled_dot_product_attention(h, k, v, **options)

    check(attend, q)
    out, jv = fused_jvp(attend, q, torch.ones_like(q))
    with sdpa_kernel(SDPBackend.MATH):
        right, right_dot = torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(jv, right_dot)


def test_a_write_behind_attention():
    """Eager's `flatten` copies here: the write reaches nothing else."""

    def block(h):
        y = F.scaled_dot_product_attention(h, h, h, attn_mask=torch.eye(2, dtype=torch.bool))
        y[:, 1:].flatten(0, -2).fill_diagonal_(-1.5)
        return y

    h = permuted((2, 2, 2, 4), (3, 2, 1, 0))
    torch.testing.assert_close(fused_jvp(block, h, torch.ones_like(h))[0], block(h))


# -- an expanded h


SHAPE = (2, 3, 4)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize(
    "op",
    [
        lambda h: (h * 2).view(-1),
        lambda h: h.sin().view(6, 4) * 2,
        lambda h: h.transpose(0, 1).exp().transpose(0, 1).view(6, 4) + 1,
        lambda h: (h + 1).flatten().mul_(2),
        lambda h: h.permute(1, 2, 0).sort(1)[0].permute(2, 0, 1).contiguous().view(-1),
        lambda h: F.layer_norm(h, (4,)).view(6, 4),
        lambda h: h.view(h.shape).view(2, 3, 2, 2) * 2,
    ],
)
def test_what_eager_views_of_an_expanded_h_is_a_view(op, dim):
    h = numbers(*SHAPE).narrow(dim, 0, 1).expand(SHAPE)
    v = numbers(*SHAPE, seed=1)
    try:
        right = op(h)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="view"):
            fused_jvp(op, h, v)
        return
    out, jv = fused_jvp(op, h, v)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(jv, torch.func.jvp(lambda h: op(h.clone()), (h.clone(),), (v,))[1])


@pytest.mark.parametrize("dim", range(3))
def test_an_expanded_h_says_what_it_is(dim):
    h = numbers(*SHAPE).narrow(dim, 0, 1).expand(SHAPE)
    check(lambda h: (h, h.mT, h[:, 1], h[..., ::2], h[None], h.diagonal(), h.unfold(2, 2, 1)), h)
    seen = []

    def block(h):
        seen.append((h.is_contiguous(), h.mT.is_contiguous(), h.flatten().stride()))
        return h * 1.0

    block(h)
    fused_jvp(block, h, torch.ones(SHAPE, dtype=h.dtype))
    assert seen[0] == seen[1]


def test_a_view_that_needs_a_copy_is_not_written_to():
    h = numbers(2, 1, 4).expand(SHAPE)

    def joined(h):
        return h.transpose(0, 1).view(3, 8)

    v = numbers(*SHAPE, seed=1)
    out, jv = fused_jvp(lambda h: joined(h).sin(), h, v)
    torch.testing.assert_close(out, joined(h).sin())
    torch.testing.assert_close(jv, (h.cos() * v).transpose(0, 1).reshape(3, 8))

    with pytest.raises(RuntimeError, match="view"):
        fused_jvp(lambda h: joined(h)[0].mul_(2), h, v)


def test_gradients_of_an_expanded_h():
    leaf = numbers(2, 1, 4).requires_grad_()
    v, out_bar, jv_bar = (numbers(*SHAPE, seed=seed) for seed in (1, 2, 3))

    def block(h):
        return (h.sin().view(6, 4) * torch.arange(4.0, dtype=h.dtype)).view(SHAPE)

    def loss(out, jv):
        return (out * out_bar).sum() + (jv * jv_bar).sum()

    found = torch.autograd.grad(loss(*fused_jvp(block, leaf.expand(SHAPE), v)), leaf)
    h = leaf.expand(SHAPE).clone()
    right = torch.autograd.grad(loss(*torch.func.jvp(block, (h,), (v,))), leaf)
    torch.testing.assert_close(found, right)


def written_copies(h):
    h.reshape(-1).mul_(2)
    h.contiguous().mul_(2)
    return h * (2.0 if h.is_contiguous() else 3.0)


def written_view(h):
    y = h.sin()
    y.view(-1)[2:5].mul_(2)
    y.reshape(-1).add_(1)
    return y


@pytest.mark.parametrize("block", [lambda h: h.sin() * 2, written_copies, written_view])
def test_an_expanded_h_in_a_compiled_block(block):
    h, v = numbers(2, 1, 4).expand(SHAPE), numbers(*SHAPE, seed=1)
    compiled = torch.compile(functools.partial(fused_jvp, block), backend="eager")
    out, jv = compiled(h, v)
    torch.testing.assert_close(out, block(h))
    torch.testing.assert_close(jv, fused_jvp(block, h, v)[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "write",
    [
        lambda h: h[:, 0].mul_(2),
        lambda h: h.transpose(0, 1).view(3, 8)[0].mul_(2),
        lambda h: h.transpose(0, 1).reshape(3, 8)[0].mul_(2),
        lambda h: h[0, :1].mul_(2),
    ],
)
def test_no_write_goes_through_an_expanded_h(write, mode):
    """Eager's reaches all rows that share the memory; a pair's have memory of their own."""

    def block(h):
        write(h)
        return h * 1.0

    with mode(), pytest.raises(RuntimeError, match=r"memory|in-place"):
        fused_jvp(block, numbers(2, 1, 4).expand(SHAPE), numbers(*SHAPE, seed=1))


def test_a_view_in_an_unusual_order_is_not_written_to():
    h = numbers(1, 3, 1, 4).expand(2, 3, 2, 4)

    def block(h):
        h.permute(3, 0, 2, 1).view(4, 4, 3)[:, 0].mul_(2)
        return h * 1.0

    with pytest.raises(RuntimeError, match="in-place"):
        fused_jvp(block, h, torch.ones_like(h))


def test_rows_of_a_sliding_window_have_tangents_of_their_own():
    h, v = numbers(6).unfold(0, 3, 1), numbers(4, 3, seed=1)
    out, jv = fused_jvp(lambda h: (h * 2).view(-1), h, v)
    torch.testing.assert_close(out, (h * 2).view(-1))
    torch.testing.assert_close(jv, (v * 2).view(-1))


def test_an_index_of_an_expanded_h():
    h = torch.as_strided(numbers(60), SHAPE, (1, 0, 2))
    index = torch.tensor([1, 0])
    check(lambda h: (h[None, index], h[:1, torch.tensor([2, 0])], h[index], h[h > 0]), h)


def test_functions_of_others_run_once():
    seen = []

    def scaled(x):
        if has_torch_function((x,)):
            return handle_torch_function(scaled, (x,), x)
        seen.append(x.detach().mean())
        return x * 1.5

    h, v = numbers(2, 1, 4).expand(SHAPE), numbers(*SHAPE, seed=1)
    out, jv = fused_jvp(lambda h: scaled(h) * 1.0, h, v)
    torch.testing.assert_close(out, h * 1.5)
    torch.testing.assert_close(jv, v * 1.5)
    assert [x.device.type for x in seen] == ["cpu"]


def test_an_expanded_h_is_forgotten():
    fused_jvp(lambda h: h.sin(), numbers(2, 1, 4).expand(SHAPE), numbers(*SHAPE, seed=1))
    gc.collect()
    assert not layout.some_expanded()


# -- other results whose order was not eager's


@pytest.mark.parametrize("order", list(orders(SHAPE)), ids=str)
@pytest.mark.parametrize(
    "op",
    [
        lambda h: 1.5**h,
        lambda h: True**h,
        lambda h: 1.0**h,
        lambda h: 2**h,
        lambda h: torch.tensor(1.5) ** h,
        lambda h: h.prod(-1),
        lambda h: h.prod(0, keepdim=True),
        lambda h: torch.cat((h, h), 1),
        lambda h: torch.stack((h, h), 1),
        lambda h: torch.stack(list(h)),
        lambda h: F.rms_norm(h, h.shape[-1:]),
        lambda h: F.group_norm(h, 1),
    ],
)
def test_lies_as_eager(op, order):
    check(op, permuted(SHAPE, order))
    check(op, numbers(2, 4, 4, 3).permute(0, 3, 1, 2))
    check(lambda h: op(h[None]), permuted(SHAPE, order))
    check(lambda h: op(h[None, ..., :2]), permuted(SHAPE, order))
    check(lambda h: op(h.unsqueeze(1).repeat(1, 2, 1, 1)), permuted(SHAPE, order))


@pytest.mark.parametrize("order", orders((2, 4, 6)), ids=str)
def test_pools_of_norms_lie_as_eager_s(order):
    for p in (1, 2.0, 3.0):
        check(lambda h, p=p: F.lp_pool1d(h.abs(), p, 2), permuted((2, 4, 6), order))
        check(lambda h, p=p: F.lp_pool2d(h.abs(), p, 2), permuted((2, 4, 6), order))
