"""The Triton attention against torch.func.jvp of its reference and autograd of that, in fp64.

On the CPU in Triton's interpreter, which computes bf16 wrongly; bf16 needs a GPU.
"""

import heapq

import oracle
import pytest
import torch
from oracle import cotangents, dual_of
from tolerances import ATTENTION

from stars_fast.ops import reference

pytest.importorskip("triton")

import triton
import triton.language as tl

from stars_fast.ops.triton.attention import attention
from stars_fast.ops.triton.attention_backward import attention_backward, backward_by
from stars_fast.ops.triton.attention_parts import place

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape, seed=0, dtype=torch.float32):
    return oracle.randn(*shape, seed=seed, dtype=dtype, device=DEVICE)


def packed(*lengths):
    """Causal spans [1, S, 2] of documents one after the other; a negative length sees nothing."""
    rows, start = [], 0
    for length in lengths:
        for i in range(abs(length)):
            rows.append((start, start + i + 1) if length > 0 else (start, start))
        start += abs(length)
    return torch.tensor([rows], dtype=torch.int32)


def window(length, size):
    """Each query sees itself and the size - 1 keys before."""
    return torch.tensor([[(max(0, i + 1 - size), i + 1) for i in range(length)]], dtype=torch.int32)


def padded(length, *kept):
    """Causal spans [B, S, 2] of batches of which only keys [from, to) exist."""
    return torch.tensor(
        [[(lo, max(lo, min(i + 1, hi))) for i in range(length)] for lo, hi in kept],
        dtype=torch.int32,
    )


def mask_of(spans, keys):
    """Spans [B, Sq, 2] as a mask [B, 1, Sq, Sk]."""
    j = torch.arange(keys, device=spans.device)
    return ((j >= spans[..., :1]) & (j < spans[..., 1:]))[:, None]


def key_spans_of(spans, keys):
    """The hull [B, Sk, 2] of the queries that see a key."""
    mask = mask_of(spans, keys)[:, 0].mT
    queries = torch.arange(mask.shape[2], device=spans.device)
    lo = torch.where(mask, queries, mask.shape[2]).amin(2)
    hi = torch.where(mask, queries + 1, 0).amax(2)
    return torch.stack((lo, hi), 2).int()


def error(got, expected):
    """Relative; where the exact gradient vanishes, as that of the logits of one key, absolute."""
    assert got.isfinite().all()
    size, each = expected.norm().item(), expected.numel() ** 0.5
    return (got.double() - expected).norm().item() / (size if size > 1e-12 * each else each)


def results(q, k, v, mask, causal, scale, bars):
    """The pair of the reference in the dtype of q, k and v, and their gradients for each of the
    cotangents."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    pair = dual_of(lambda *x: reference.attention(*x, mask, causal, scale), leaves)
    grads = [
        torch.autograd.grad(pair, leaves, bar.to(pair.dtype), retain_graph=True) for bar in bars
    ]
    return pair.detach(), grads


def expected_results(q, k, v, *setting):
    """`results` in fp64."""
    return results(q.double(), k.double(), v.double(), *setting)


def errors(q, k, v, spans=None, causal=False, scale=None, design="split", exact=False):
    """The largest relative error of o, o_dot, and of the halves of each gradient over cotangents of
    both outputs and of each alone."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.shape[3]
    spans = None if spans is None else spans.to(DEVICE)
    mask = None if spans is None else mask_of(spans, keys)
    key_spans = None if spans is None else key_spans_of(spans, keys)
    bars = cotangents(q.shape, 9, q.dtype, DEVICE)
    expected, expected_grads = expected_results(q, k, v, mask, causal, scale, bars)
    out, lse, mu = attention(q, k, v, spans, key_spans, causal, scale)
    assert out.dtype == q.dtype
    assert out.transpose(2, 3).is_contiguous()
    assert lse.dtype == mu.dtype == torch.float32
    found = {"o": error(out[0], expected[0]), "o_dot": error(out[1], expected[1])}
    for bar, theirs in zip(bars, expected_grads, strict=True):
        saved = q, k, v, out, lse, mu, spans, key_spans
        mine = backward_by(design, bar, *saved, causal, scale, exact)
        for name, x, y in zip("qkv", mine, theirs, strict=True):
            assert x.dtype == q.dtype
            assert x.shape == y.shape
            for half, suffix in enumerate(("", "_dot")):
                key = f"{name}{suffix}_bar"
                found[key] = max(found.get(key, 0.0), error(x[half], y[half]))
    return found


def inputs(batch, heads, kv_heads, length, keys, width, dtype=torch.float32):
    return (
        randn(2, batch, heads, length, width, dtype=dtype),
        randn(2, batch, kv_heads, keys, width, seed=1, dtype=dtype),
        randn(2, batch, kv_heads, keys, width, seed=2, dtype=dtype),
    )


def check(*args, **kwargs):
    q = args[0]
    for name, value in errors(*args, **kwargs).items():
        assert value <= ATTENTION[q.dtype], name


DENSE = {
    # batch, heads, kv heads, queries, keys, width
    "S1-D64": (2, 1, 1, 1, 1, 64),
    "S33-D16-H4/2": (1, 4, 2, 33, 33, 16),
    "S80-D40": (1, 1, 1, 80, 80, 40),
    "S33-D64-H4/1": (1, 4, 1, 33, 33, 64),
    "S97-D64": (1, 1, 1, 97, 97, 64),
    "B2-S40-D80": (2, 1, 1, 40, 40, 80),
    "S33-D96": (1, 1, 1, 33, 33, 96),
    "S33-D256": (1, 1, 1, 33, 33, 256),
    "Sq33-Sk80-D8": (1, 1, 1, 33, 80, 8),
    "Sq80-Sk33-D64": (1, 1, 1, 80, 33, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", DENSE.values(), ids=DENSE.keys())
def test_dense(shape, causal):
    check(*inputs(*shape), causal=causal)


@pytest.mark.slow
def test_a_longer_one():
    check(*inputs(1, 1, 1, 200, 200, 128), causal=True)


SPANNED = {
    "packed": ((1, 2, 1, 97, 97, 64), packed(1, 40, -3, 1, 30, 16, 6)),
    "packed-long": ((1, 1, 1, 200, 200, 16), packed(70, 1, 129)),
    "one-document": ((1, 1, 1, 80, 80, 40), packed(80)),
    "left-pad": ((3, 1, 1, 50, 50, 64), padded(50, (0, 50), (7, 50), (50, 50))),
    "right-pad": ((2, 2, 1, 50, 50, 16), padded(50, (0, 50), (0, 33))),
    "window": ((2, 1, 1, 80, 80, 80), window(80, 20)),
    "window-wide": ((1, 1, 1, 97, 97, 128), window(97, 64)),
    "bottom-right": ((1, 2, 1, 17, 80, 64), padded(80, (0, 80))[:, -17:]),
    "nothing-seen": ((1, 1, 1, 33, 33, 64), packed(-33)),
    "D256": ((1, 1, 1, 33, 33, 256), packed(16, 17)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "spans"), SPANNED.values(), ids=SPANNED.keys())
def test_spans(shape, spans):
    check(*inputs(*shape), spans)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("shape", "spans"),
    [((1, 2, 1, 50, 50, 64), None), ((1, 1, 1, 65, 65, 128), packed(20, 45))],
    ids=["causal", "packed"],
)
def test_16_bits(shape, spans, dtype):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies the bits of bf16 as integers")
    check(*inputs(*shape, dtype=dtype), spans, causal=spans is None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_a_component_that_all_tangents_of_keys_share_costs_no_precision(dtype):
    q, k, v = inputs(1, 1, 1, 65, 65, 64, dtype)
    k[1] += 16 * randn(64, seed=5, dtype=dtype)
    found = errors(q, k, v, packed(20, 45))
    # dS_dot is rounded to 16 bits before its product with K_dot: q_bar has the error of any
    # attention whose keys share a component.
    assert all(value <= ATTENTION[dtype] for name, value in found.items() if name != "q_bar")


def test_rows_that_see_nothing_give_zero():
    q, k, v = inputs(1, 1, 1, 40, 40, 16)
    spans = packed(20, -10, 10).to(DEVICE)
    setting = (spans, key_spans_of(spans, 40), False, 0.25)
    out, lse, mu = attention(q, k, v, *setting)
    empty = slice(20, 30)
    assert (out[:, :, :, empty] == 0).all()
    assert (lse[:, :, :, empty] == -torch.inf).all()
    assert (mu[:, :, empty] == 0).all()
    for grad in attention_backward(randn(*q.shape), q, k, v, out, lse, mu, *setting):
        assert (grad[:, :, :, empty] == 0).all()


def far(q, k, v, name, factor=300):
    """Inputs whose logits, or tangents of logits, are far apart or far from 0; and spans."""
    spans = None
    if name.startswith("logits"):
        factor = float(name.split()[1])
        q, k = factor * q, factor * k
    elif name == "primal":
        q[0] *= factor
        k[0] *= factor
    elif name == "offset":
        k[1] += factor * randn(k.shape[-1], seed=5, dtype=k.dtype)
    elif name == "one key":  # in the middle: the keys before it lose their weight
        k[:, :, :, 40] *= factor
    elif name == "equal keys":
        q, k = factor * q, factor * k[:, :, :, :1].expand_as(k)
    elif name == "two keys":  # of half the weight each, tangents of opposite sign
        k *= 0.1
        k[:, :, :, 60] = factor * k[:, :, :, 7]
        k[:, :, :, 7] = k[:, :, :, 60]
        k[1, :, :, 60] *= -1
    else:
        q, k = factor * q, factor * k
        spans = padded(80, (33, 80)) if name == "padded" else packed(33, -3, 44)
    return q, k, v, spans


FAR = [
    "logits 10", "logits 100", "logits 1000", "primal", "offset", "one key", "two keys",
    "equal keys", "padded", "packed",
]  # fmt: skip
FAR_16 = ["logits 5", "primal", "offset", "one key", "two keys", "padded"]
OUTPUTS = "o o_dot q_bar q_dot_bar k_bar k_dot_bar v_bar v_dot_bar".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "causal", "scale"),
    [(64, True, None), (128, False, None), (64, True, -0.125)],
    ids=["D64-causal", "D128", "negative"],
)
@pytest.mark.parametrize("name", FAR)
def test_far_logits_err_no_more_than_eager(name, width, causal, scale):
    check_against_eager(*far(*inputs(1, 1, 1, 80, 80, width), name), causal, scale)


@pytest.mark.parametrize("name", FAR_16)
def test_far_logits_err_no_more_than_eager_in_16_bits(name):
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    q, k, v, spans = far(*inputs(1, 1, 1, 80, 80, 64, dtype), name, 30)
    check_against_eager(q, k, v, spans, True, 0.02)


def check_against_eager(q, k, v, spans, causal, scale):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    causal = causal and spans is None
    spans = None if spans is None else spans.to(DEVICE)
    mask = None if spans is None else mask_of(spans, k.shape[3])
    key_spans = None if spans is None else key_spans_of(spans, k.shape[3])
    bar = randn(*q.shape, seed=9, dtype=q.dtype)
    exact, (grads,) = expected_results(q, k, v, mask, causal, scale, [bar])
    exact = [*exact, *(half for grad in grads for half in grad)]
    eager, (grads,) = results(q, k, v, mask, causal, scale, [bar])
    eager = [*eager, *(half for grad in grads for half in grad)]
    out, lse, mu = attention(q, k, v, spans, key_spans, causal, scale)
    mine = attention_backward(bar, q, k, v, out, lse, mu, spans, key_spans, causal, scale)
    mine = [*out, *(half for grad in mine for half in grad)]
    for name, got, plain, truth in zip(OUTPUTS, mine, eager, exact, strict=True):
        found, allowed = error(got, truth), error(plain, truth)
        assert found <= max(3 * allowed, ATTENTION[q.dtype]), f"{name}: {found}, eager {allowed}"


def test_a_scale_of_zero_weighs_all_keys_alike():
    q, k, v = inputs(1, 1, 1, 40, 40, 16)
    out, lse, mu = attention(q, k, v, None, None, True, 0.0)
    count = torch.arange(1, 41, device=DEVICE)[:, None]
    assert error(out, v.double().cumsum(3) / count) <= ATTENTION[torch.float32]
    bar = randn(*q.shape, seed=9)
    q_bar, k_bar, _ = attention_backward(bar, q, k, v, out, lse, mu, None, None, True, 0.0)
    assert (q_bar == 0).all()
    assert (k_bar == 0).all()


def test_large_logits_stay_finite():
    q, k, v = inputs(1, 1, 1, 40, 40, 16)
    q, k = 100 * q, 100 * k  # logits of 1e4 and more
    setting = (None, None, True, 1.0)
    out, lse, mu = attention(q, k, v, *setting)
    expected = reference.attention(q[0].double(), k[0].double(), v[0].double(), None, True, 1.0)
    assert lse.abs().max() > 1e4
    assert error(out[0], expected) <= 1e-2  # of a logit of 1e5 fp32 keeps two digits
    grads = attention_backward(randn(*q.shape), q, k, v, out, lse, mu, *setting)
    assert all(torch.isfinite(x).all() for x in (out, lse, mu, *grads))


def slices_of(fused, heads, kv_heads):
    """q, k and v of one projection [2, B, S, H + 2 Hkv, D]."""
    return fused.transpose(2, 3).split((heads, kv_heads, kv_heads), 2)


@pytest.mark.parametrize("width", [40, 13], ids=["aligned", "unaligned"])
def test_reads_slices_of_one_projection_without_a_copy(width, monkeypatch):
    q, k, v = slices_of(randn(2, 1, 33, 4, width), 2, 1)

    def copies(*args, **kwargs):
        raise AssertionError("copied")

    plain = attention(q, k, v, None, None, True, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", copies)
        again = attention(q, k, v, None, None, True, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    check(q, k, v, causal=True)


def test_other_layouts():
    q, k, v = inputs(1, 1, 1, 33, 33, 16)
    last_but_one = [x.mT.contiguous().mT for x in (q, k, v)]
    assert all(x.stride(-1) != 1 for x in last_but_one)
    check(*last_but_one, causal=True)
    check(q, k[:, :, :, :1].expand_as(k), v, causal=True)


@pytest.mark.slow
def test_addresses_beyond_32_bits(monkeypatch):
    if DEVICE == "cpu":  # the interpreter would copy all of the storage onto itself
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    step = 2**26  # times 32 rows: 2^31
    storage = torch.zeros(33 * step, dtype=torch.float16, device=DEVICE)
    q, k, v = (
        storage.as_strided((2, 1, 1, 33, 16), (64, 0, 0, step, 1), storage_offset=16 * i).copy_(x)
        for i, x in enumerate(inputs(1, 1, 1, 33, 33, 16, torch.float16))
    )
    check(q, k, v, causal=True)


def test_any_number_of_batches_and_heads(monkeypatch):
    """A grid has 2^31 - 1 places on its first axis, 65,535 on the others."""
    if DEVICE == "cuda":
        return check(*inputs(70_000, 1, 1, 2, 2, 16), causal=True)
    from triton.runtime.interpreter import InterpretedFunction

    grids = []
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda kernel, *args, grid, **kwargs: grids.append(grid)
    )
    for batch, heads in ((70_000, 1), (1, 70_000), (300, 300)):
        for width in (1, 65):  # backward in one kernel, in two
            x = torch.zeros(2, batch, heads, 1, width, device=DEVICE)
            _, lse, mu = attention(x, x, x, None, None, True, 1.0)
            attention_backward(x, x, x, x, x, lse, mu, None, None, True, 1.0)
        assert all(grid[0] >= batch * heads for grid in grids[-9:])
    assert len(grids) == 3 * (4 + 5)
    assert all(len(grid) == 1 and grid[0] < 2**31 for grid in grids)


def test_no_queries_and_no_keys():
    for length, keys in ((0, 5), (5, 0), (0, 0)):
        q, k, v = inputs(1, 2, 1, length, keys, 16)
        out, lse, mu = attention(q, k, v, None, None, False, 1.0)
        assert out.shape == q.shape
        assert (out == 0).all()
        grads = attention_backward(out, q, k, v, out, lse, mu, None, None, False, 1.0)
        assert all(
            (g == 0).all() and g.shape == x.shape for g, x in zip(grads, (q, k, v), strict=True)
        )


def test_wider_heads_are_refused_by_name():
    q, k, v = inputs(1, 1, 1, 1, 1, 257)
    with pytest.raises(ValueError, match="up to 256 wide, got 257"):
        attention(q, k, v, None, None, False, 1.0)


def print_errors():
    """The worst error of each result over the shapes above, in fp32."""
    worst = {}
    cases = [(shape, None, causal) for shape in DENSE.values() for causal in (False, True)]
    cases += [(shape, spans, False) for shape, spans in SPANNED.values()]
    for shape, spans, causal in cases:
        for name, value in errors(*inputs(*shape), spans, causal).items():
            worst[name] = max(worst.get(name, 0.0), value)
    for name, value in worst.items():
        print(f"{name:10} {value:.1e}")


@triton.jit
def _places(found, heads, batches):
    block, head, batch = place(heads, batches)
    at = found + tl.program_id(0) * 3
    tl.store(at, block)
    tl.store(at + 1, head)
    tl.store(at + 2, batch)


def makespan(costs, processors):
    """Time until the last of the programs ends, each taken in order by the first free processor."""
    free = [0.0] * processors
    for cost in costs:
        heapq.heappush(free, heapq.heappop(free) + cost)
    return max(free)


@pytest.mark.parametrize("processors", [132, 108], ids=["h100", "a100"])
@pytest.mark.parametrize(("length", "bound"), [(2048, 1.10), (4096, 1.03), (8192, 1.02)])
def test_long_blocks_start_first_so_that_processors_end_together(length, bound, processors):
    """A simulation of one program a processor, causal, 16 heads, blocks of 128 rows."""
    heads, batches, held = 16, 1, 128
    blocks = length // held
    found = torch.empty(blocks * heads * batches, 3, dtype=torch.int32, device=DEVICE)
    _places[(len(found),)](found, heads, batches)
    assert len({tuple(at) for at in found.tolist()}) == len(found)
    costs = [blocks - block for block, _, _ in found.tolist()]  # causal kernels count from the end
    ideal = max(sum(costs) / processors, max(costs))
    assert makespan(costs, processors) <= bound * ideal
    # The order with the blocks of a head together, which this one replaces.
    worse = [block + 1 for _ in range(heads) for block in reversed(range(blocks))]
    assert makespan(worse, processors) > makespan(costs, processors)
